"""Schedules of checkpoints: complete, within their places, and as few repeated steps as can be."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.graph.loops.checkpoint_schedule import (
    checkpoints_for,
    draw_schedule,
    first_checkpoints,
    schedule,
)


@given(num_steps=st.integers(0, 300), checkpoints=st.integers(0, 20))
def test_every_step_is_reversed_once_from_a_state_that_is_there(num_steps: int, checkpoints: int) -> None:
    kept = {0, *first_checkpoints(num_steps, checkpoints)}
    reversed_steps = []
    for action in schedule(num_steps, checkpoints):
        assert action.begin in kept and action.begin <= action.step
        if action.kind == "keep":
            kept.add(action.step)
            assert len(kept) <= checkpoints + 1
        else:
            reversed_steps.append(action.step)
            kept.discard(action.step)
    assert reversed_steps == list(reversed(range(num_steps)))


@cache
def fewest(num_steps: int, places: int) -> int:
    """Steps to take for reversing all, beginning with one state, by trying every place for the next one."""
    if num_steps < 2:
        return 0
    if places == 1:
        return num_steps * (num_steps - 1) // 2
    return min(m + fewest(num_steps - m, places - 1) + fewest(m, places) for m in range(1, num_steps))


@cache
def fewest_after_forward(num_steps: int, places: int) -> int:
    """The same where forward, which is taken anyway, places the first states."""
    if num_steps < 2:
        return 0
    if places == 1:
        return num_steps * (num_steps - 1) // 2
    return min(fewest_after_forward(num_steps - m, places - 1) + fewest(m, places) for m in range(1, num_steps))


@pytest.mark.parametrize("checkpoints", range(6))
def test_no_schedule_repeats_fewer_steps(checkpoints: int) -> None:
    for num_steps in range(40):
        num_repeated = sum(action.step - action.begin for action in schedule(num_steps, checkpoints))
        assert num_repeated == fewest_after_forward(num_steps, checkpoints + 1)


def test_by_default_no_step_is_repeated_twice() -> None:
    assert [checkpoints_for(n) for n in (0, 1, 2, 3, 100, 10_000)] == [0, 0, 0, 1, 12, 139]
    for num_steps in (1, 2, 7, 100, 1000):
        repeats = [0] * num_steps
        for action in schedule(num_steps, checkpoints_for(num_steps)):
            for step in range(action.begin, action.step):
                repeats[step] += 1
        assert max(repeats) <= 1


def test_drawn_schedule_of_eight_steps() -> None:
    assert draw_schedule(8, 2).splitlines() == [
        "step       0  1  2  3  4  5  6  7",
        "forward    o  >  >  >  o  >  >  o",
        "                                <",
        "                       o  o  <",
        "                          <",
        "                       <",
        "           o  o  o  <",
        "                 <",
        "              <",
        "           <",
    ]
