"""Shares by measured speed: dealt alike by all ranks, exact, adapting, recorded and repeated."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.proving.test_lockstep import small_mlp
from weft.distributed.channels.share_log import read_speeds
from weft.distributed.group import AbstractGroup
from weft.distributed.group.clock import RealClock
from weft.distributed.placement.shares import MeasuredShares, measure_stages
from weft.distributed.virtual import run_virtual
from weft.records.run_folder import create_run_folder
from weft.simulation.computation import ComputeModel
from weft.simulation.simulation import Simulation, simulate
from weft.simulation.stragglers import parse_stragglers
from weft.specs import Mesh
from weft.training.sampling import deal, span, span_by_speed

COMPUTE = ComputeModel(seconds_per_pass=0.002, seconds_per_sample=0.001, seconds_per_update=0.0, ready={})


@given(st.integers(0, 300), st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_shares_are_a_partition_in_which_nobody_is_left_out(length: int, speeds: list[int]) -> None:
    sizes = deal(length, speeds)
    assert sum(sizes) == length and (min(sizes) >= 1 or length < len(speeds))
    spans = [span_by_speed(length, rank, speeds) for rank in range(len(speeds))]
    assert [i for own in spans for i in range(length)[own]] == list(range(length))


def test_equal_speeds_deal_as_equal_shares_do() -> None:
    for length in range(40):
        assert [span_by_speed(length, r, [7] * 6) for r in range(6)] == [span(length, r, 6) for r in range(6)]


def run_slow(tmp_path: Path, plan: str, slow: str = "rank 2 3x slower", **options: Any) -> Simulation:
    recipe = small_mlp(epochs=2).with_setting("plan", plan)
    folder = create_run_folder(tmp_path / f"run-{len(list(tmp_path.iterdir()))}", recipe.name)
    return simulate(recipe, folder=folder, compute=COMPUTE, stragglers=parse_stragglers(slow), **options)


@pytest.mark.parametrize("topology", ["native", "server(2)"])
def test_a_slow_rank_is_given_less_and_the_others_wait_less(topology: str, tmp_path: Path) -> None:
    equal = run_slow(tmp_path, f"data=3 topology={topology}")
    measured = run_slow(tmp_path, f"data=3 share=measured(5) topology={topology}")
    assert measured.virtual_seconds < 0.7 * equal.virtual_seconds
    assert sum(measured.idle_shares) < 0.5 * sum(equal.idle_shares)
    speeds = read_speeds(tmp_path / "run-1", 0)
    assert [min(speeds)] == [5] and speeds[max(speeds)].speeds[2] < 400


def measured_on(size: int, slowness: Callable[[int, int], float], num_steps: int) -> list[tuple[int, ...]]:
    """The speeds after every step, of ranks that take `slowness(rank, step)` seconds for a sample."""

    def program(group: AbstractGroup) -> list[tuple[int, ...]]:
        shares = MeasuredShares(Mesh(group.rank, data=size), 4, group.clock)
        found = []
        for step in range(num_steps):
            own = shares.span(60)
            shares.start(own.stop - own.start)
            group.clock.charge((own.stop - own.start) * slowness(group.rank, step))
            shares.stop()
            shares.end_step(partial(gather_in, group))
            found.append(shares.speeds)
        return found

    first, *others = run_virtual(program, size).results
    assert all(other == first for other in others)
    return list(first)


def gather_in(group: AbstractGroup, tensor: Tensor) -> Sequence[Tensor]:
    found = tensor.new_empty(group.size)
    group.all_gather(found, tensor.reshape(1))
    return tuple(found)


def test_a_rank_that_slows_down_is_given_less_from_then_on() -> None:
    speeds = measured_on(3, lambda rank, step: 0.03 if rank == 1 and step >= 8 else 0.01, 24)
    assert speeds[7] == (1000, 1000, 1000)
    assert speeds[11] == (1000, 500, 1000)  # half of the change at once
    assert 333 <= speeds[23][1] < 400


def test_a_step_that_is_held_up_by_chance_changes_nothing() -> None:
    assert set(measured_on(2, lambda rank, step: 0.5 if (rank, step) == (0, 2) else 0.01, 8)) == {(1000, 1000)}


def test_the_slowest_rank_of_a_replica_counts_and_stages_have_speeds() -> None:
    def program(group: AbstractGroup) -> tuple[tuple[int, ...], tuple[float, ...]]:
        mesh, slow = Mesh(group.rank, data=2, pipeline=2), group.rank == 2  # stage 1 of replica 0
        shares = MeasuredShares(mesh, 1, group.clock)
        shares.start(10)
        group.clock.charge(2.0 if slow else 1.0)
        shares.stop()
        shares.end_step(partial(gather_in, group))
        return shares.speeds, measure_stages(group, mesh, lambda: group.clock.charge(4.0 if slow else 1.0))

    assert set(run_virtual(program, 4).results) == {((500, 1000), (1.0, 0.25))}


def test_what_was_measured_goes_on_after_a_checkpoint() -> None:
    one, two = (MeasuredShares(Mesh(0, data=2), 1, RealClock()) for _ in range(2))
    one.end_step(lambda _own: torch.tensor([0.25, 0.5], dtype=torch.float64).unbind())
    two.remember(1, one.memory())
    assert one.speeds == two.speeds == (1000, 500)
    three = MeasuredShares(Mesh(0, data=3), 1, RealClock())
    three.remember(1, one.memory())
    assert three.speeds == (1000, 1000, 1000)


def test_a_replica_without_samples_keeps_its_speed() -> None:
    shares = MeasuredShares(Mesh(0, data=2), 1, RealClock())
    shares.end_step(lambda _own: torch.tensor([0.25, math.nan], dtype=torch.float64).unbind())
    assert shares.speeds == (1000, 1000)
    shares.end_step(lambda _own: torch.tensor([0.25, 0.5], dtype=torch.float64).unbind())
    shares.end_step(lambda _own: torch.tensor([0.25, math.nan], dtype=torch.float64).unbind())
    assert shares.speeds == (1000, 500)


def test_a_run_is_repeated_by_its_record_whatever_ranks_are_slow_now(tmp_path: Path) -> None:
    first = run_slow(tmp_path, "data=3 share=measured(5)")
    again = run_slow(tmp_path, "data=3 share=measured(5)", "rank 0 4x slower", replay=tmp_path / "run-0")
    other = run_slow(tmp_path, "data=3 share=measured(5)", "rank 0 4x slower")
    hashes = [run.record.repetitions[0].hashes["parameters"] for run in (first, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert read_speeds(tmp_path / "run-1", 0) == read_speeds(tmp_path / "run-0", 0)
