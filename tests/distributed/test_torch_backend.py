"""`backend="weft"` under torch.distributed, in two real processes: DDP gives what Gloo gives; FSDP2 and DTensor run."""

from typing import Any

import pytest

from tests.processes.ranks import run_processes

PATH = "tests.distributed.torch_backend_programs:run"


def run(program: str) -> tuple[list[Any], list[Any]]:
    """What the ranks found over Weft, and over Gloo."""
    first, second = run_processes(PATH, 2, deadline=90, program=program, backends=["weft", "gloo"])
    return [first[0], second[0]], [first[1], second[1]]


@pytest.mark.slow
def test_ddp_gives_the_bits_of_gloo() -> None:
    weft, gloo = run("ddp")
    assert weft[0] == weft[1] == gloo[0]


@pytest.mark.slow
def test_fsdp2_and_dtensor_give_what_gloo_gives() -> None:
    weft, gloo = run("fsdp_and_dtensor")
    assert weft == gloo
    assert weft[0][1] is True


@pytest.mark.slow
def test_the_other_calls() -> None:
    weft, gloo = run("calls")
    averages = [weft[0].pop(6), weft[1].pop(6)]
    sums = [gloo[0].pop(6), gloo[1].pop(6)]
    assert weft == gloo
    assert averages == [[0.5] * 3] * 2
    assert sums == [[1.0] * 3] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    ["unequal_parts", "like_gloo", "hooks", "checkpoints", "counted", "profiled", "subgroups"],
)
def test_what_was_lacking_is_as_with_gloo(program: str) -> None:
    weft, gloo = run(program)
    assert weft == gloo


def test_a_wait_ends_when_its_time_is_over() -> None:
    """It used to wait for as long as the group's own timeout."""
    (first,), (second,) = run_processes(PATH, 2, deadline=90, program="limits", backends=["weft"])
    assert first[0].startswith("DeadlineError: timed out waiting for a call (timeout: 0.05 s)")
    assert first[1] == second[1] == [2.0] * 4


def run_alone(program: str) -> list[Any]:
    (first,), (second,) = run_processes(PATH, 2, deadline=90, program=program, backends=["weft"])
    return [first, second]


def test_a_callback_of_a_future_may_wait_for_another() -> None:
    """The one thread that completed futures used to wait for itself. With Gloo two callbacks that wait are too many."""
    first, second = run_alone("nested_futures")
    assert first == second == [[2.0 * number + 1] * 3 for number in range(5)]


def test_a_group_is_split() -> None:
    first, second = run_alone("split")
    assert first == [1, True, 1, True, [1.0, 1.0], [2.0, 2.0]]
    assert second == [1, True, 0, True, [2.0, 2.0], [2.0, 2.0]]


def test_barriers_say_who_did_not_come() -> None:
    first, second = run_alone("barriers")
    assert first[0].startswith("Ranks 1 failed to pass monitoredBarrier in 30 ms")
    assert first[1].startswith("timed out waiting for a call (timeout: 0.03 s)")
    assert second == []
