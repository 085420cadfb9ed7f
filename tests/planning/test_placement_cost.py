"""Costs of splits: where a collective is all there is to one, they are the collective's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.collective_cost import Algorithm, all_reduce_cost
from weft.planning.placement_cost import (
    bubble_share,
    cut_cost,
    expert_cost,
    halo_cost,
    linear_cost,
    pipeline_cost,
    sharded_cost,
    sharded_memory,
    tensor_cost,
)
from weft.planning.plan_cost import plan_cost
from weft.specs import parse_plan

ranks = st.integers(2, 64)


@given(ranks, st.floats(1e3, 1e9), st.floats(0, 1e9))
def test_each_level_holds_less(num_ranks: int, parameters: float, state: float) -> None:
    held = [sharded_memory(level, num_ranks, parameters, state).total for level in range(4)]
    assert held == sorted(held, reverse=True)
    assert held[3] == pytest.approx(held[0] / num_ranks)


@given(ranks, st.floats(1e3, 1e9))
def test_levels_1_and_2_send_what_an_all_reduce_sends_and_level_3_half_as_much_again(size: int, m: float) -> None:
    reduced = all_reduce_cost(Algorithm("ring"), size, m).busiest.bytes_sent
    assert [sharded_cost(level, size, m).bytes_sent / reduced for level in (1, 2, 3)] == pytest.approx([1, 1, 1.5])


def test_a_plan_of_shards_sends_what_its_split_sends() -> None:
    assert plan_cost(parse_plan("shard=4"), 1000.0).rank_bytes == sharded_cost(1, 4, 1000.0).bytes_sent


@given(ranks, st.integers(1, 128), st.integers(1, 4))
def test_more_micro_batches_and_more_chunks_leave_less_idle(stages: int, micro: int, chunks: int) -> None:
    share = bubble_share(stages, micro, chunks)
    assert 0 < share < 1
    assert bubble_share(stages, micro + 1, chunks) < share
    assert bubble_share(stages, micro, chunks + 1) < share


def test_splits_that_have_nothing_to_send_send_nothing() -> None:
    nothing = [tensor_cost(1, 1e6), expert_cost(1, 1e6), linear_cost(1, 1e6, 1e6), halo_cost(1e3, 0)]
    nothing += [sharded_cost(3, 1, 1e6), pipeline_cost(8, 0.0, 0.0), cut_cost(1, 1), cut_cost(4, 2)]
    assert [cost.bytes_sent for cost in nothing] == [0.0] * 8


def test_a_stage_in_the_middle_sends_both_ways() -> None:
    assert pipeline_cost(8, 10.0, 20.0).bytes_sent == 8 * (10 + 20)


def test_a_cut_is_told_once_and_speeds_before_it() -> None:
    told = cut_cost(4, 3, num_steps=1)
    assert cut_cost(4, 3, num_steps=1, measures_speeds=True).bytes_sent == told.bytes_sent + 3 * 8
    assert cut_cost(4, 3, num_steps=100).bytes_sent == told.bytes_sent / 100
