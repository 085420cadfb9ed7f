"""Schedules as data: every action once, in an order that never blocks, with the idle time and memory of formulas."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.distributed.placement.pipeline import schedule_of
from weft.distributed.placement.pipeline.actions import Action, Schedule
from weft.distributed.placement.pipeline.schedules import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    pipedream,
    stream,
    zero_bubble,
)
from weft.distributed.placement.pipeline.timeline import StuckError, most_in_flight, play
from weft.specs import parse_plan
from weft.specs.plan import Choice

Make = Callable[[int, Choice], Schedule]
ALL: tuple[Make, ...] = (gpipe, one_forward_one_backward, interleaved, zero_bubble)


def make(function: Make, num_stages: int, num_micro: int, num_chunks: int = 2) -> Schedule:
    chunks = (("chunks", num_chunks),) if function is interleaved else ()
    return function(num_stages, Choice("any", (("micro", num_micro), *chunks)))


def check(schedule: Schedule) -> None:
    """Every micro-batch once forward and once backward through every chunk; gradients of parameters after those of
    inputs; the same order on every edge; and no stage waits for ever."""
    whole = set(product(range(schedule.num_chunks), range(schedule.num_micro)))
    for row in schedule.stages:
        kinds = {kind: [(a.chunk, a.micro) for a in row if a.kind == kind] for kind in {a.kind for a in row}}
        backward = ["backward"] if "backward" in kinds else ["backward_input", "backward_weight"]
        assert kinds.keys() == {"forward", *backward}
        for found in kinds.values():
            assert len(found) == len(whole) and set(found) == whole
            for chunk in range(schedule.num_chunks):  # messages of an edge are not told apart but by their order
                assert [micro for own, micro in found if own == chunk] == list(range(schedule.num_micro))
    play(schedule)


sizes = st.integers(1, 64), st.integers(1, 128), st.integers(1, 4)


@given(st.sampled_from(ALL), *sizes)
@settings(max_examples=15, deadline=None)
def test_every_action_comes_once_and_none_waits_for_ever(function: Make, n: int, m: int, v: int) -> None:
    check(make(function, n, m, v))


@pytest.mark.parametrize("function", ALL)
def test_so_it_is_for_all_small_ones_and_for_the_largest(function: Make) -> None:
    for n, m in [*product(range(1, 7), range(1, 14)), (64, 128), (64, 1), (64, 63)]:
        check(make(function, n, m, 3))


@pytest.mark.long
@pytest.mark.parametrize("function", ALL)
def test_so_it_is_for_all(function: Make) -> None:
    for n, m in product(range(1, 65), range(1, 129)):
        check(make(function, n, m))


@given(st.sampled_from([gpipe, one_forward_one_backward]), *sizes[:2])
@settings(max_examples=12, deadline=None)
def test_idle_share_is_that_of_the_formula(function: Make, n: int, m: int) -> None:
    assert play(make(function, n, m)).idle_share == pytest.approx((n - 1) / (m + n - 1))


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_chunks_divide_the_idle_time(n: int, rounds: int, v: int) -> None:
    m = n * rounds
    assert play(make(interleaved, n, m, v)).idle_share == pytest.approx((n - 1) / (v * m + n - 1))


@given(st.integers(1, 64), st.integers(0, 64))
@settings(max_examples=12, deadline=None)
def test_zero_bubble_is_idle_for_one_unit_a_stage(n: int, more: int) -> None:
    m = n + more
    assert play(make(zero_bubble, n, m)).idle_share == pytest.approx((n - 1) / (3 * m + n - 1))


@given(*sizes)
@settings(max_examples=12, deadline=None)
def test_memory_in_flight_is_that_of_the_formula(n: int, m: int, v: int) -> None:
    assert [most_in_flight(row) for row in make(gpipe, n, m).stages] == [m] * n
    assert [most_in_flight(row) for row in make(one_forward_one_backward, n, m).stages] == [
        min(m, n - s) for s in range(n)
    ]
    assert [most_in_flight(row) for row in make(zero_bubble, n, m).stages] == [min(m, n)] * n
    for s, row in enumerate(make(interleaved, n, m, v).stages):
        bound = min(v * m, 2 * (n - s - 1) + (v - 1) * n + 1)
        assert most_in_flight(row) == bound if m % n == 0 else most_in_flight(row) <= bound


def test_a_stage_that_waits_for_one_that_waits_for_it_is_found() -> None:
    """The fault: one stage does a backward pass before its neighbour has the forward pass that it needs."""
    good = make(one_forward_one_backward, 2, 2)
    first = (Action("forward", 0, 0), Action("backward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 1))
    last = (Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 0), Action("backward", 0, 1))
    with pytest.raises(StuckError):
        play(replace(good, stages=(first, last)))


def test_a_message_takes_its_time_between_stages_alone() -> None:
    assert play(make(one_forward_one_backward, 2, 1), link=0.5).seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2


def test_the_endless_stream_begins_as_1f1b() -> None:
    schedule = make(one_forward_one_backward, 4, 50)
    for stage in range(4):
        assert tuple(islice(stream(4, stage), 80)) == schedule.stages[stage][:80]
    assert pipedream(3, Choice("pipedream", (("sync", "own"),))).num_micro == 9


@pytest.mark.parametrize("text", ["gpipe(3)", "1f1b(3)", "interleaved(3)", "zero_bubble(3)"])
def test_a_plan_names_its_schedule(text: str) -> None:
    plan = parse_plan(f"pipeline=2 schedule={text}")
    assert schedule_of(2, plan.schedule).num_micro == plan.num_micro_batches == 3
    assert schedule_of(2, plan.schedule, 5).num_micro == 5


def test_eight_micro_batches_where_a_plan_does_not_say() -> None:
    plan = parse_plan("pipeline=2")
    assert schedule_of(2, plan.schedule).num_micro == plan.num_micro_batches == 8
