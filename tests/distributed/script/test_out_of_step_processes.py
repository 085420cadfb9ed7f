"""Scripts whose ranks fall out of step end by themselves under `weft launch`, and the error names ranks, calls, files
and lines."""

import re
from pathlib import Path

import pytest

from tests.command_line import Outcome, run_weft

SCRIPT = Path(__file__).with_name("out_of_step_script.py")


def line_of(text: str) -> int:
    """The last line of the script with this text, counted from 1."""
    return max(number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line)


def launch(capfd: pytest.CaptureFixture[str], way: str) -> Outcome:
    outcome = run_weft(capfd, "launch", "--workers", "2", SCRIPT, way)
    assert outcome.code == 2, outcome
    return outcome


def place_of(told: str, rank: int) -> tuple[str, int]:
    """The call and the line in which a rank was, as an error tells it."""
    found = re.search(rf"\n  rank {rank} (?:waits in|.* its last call was) (.*) at \S*{SCRIPT.name}:(\d+)", told)
    assert found is not None, told
    return found[1], int(found[2])


def test_ranks_that_meet_in_one_call_are_told_what_differs_and_one_that_is_late_is_waited_for(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In one launch, whose last trouble is a loop with a batch more on one rank."""
    outcome = launch(capfd, "batches")
    told = dict(re.findall(r"\[(\w+)\] ranks are out of step: (.*)", outcome.out))
    assert told == {
        "weave_different_models": "parameter weight is float32 (2, 4) on rank 0, float32 (3, 4) on rank 1",
        "mean_or_gather": "rank 0 is in weft.mean, rank 1 in weft.gather",
        "mean_in_two_places": "weft.mean is called at two places of the script",
        "iterate_different_lengths": "samples is 16 on rank 0, 20 on rank 1",
    }
    gather = (
        rf"rank 1 in weft.gather at \S*{SCRIPT.name}:{line_of('weft.gather')} in mean_or_gather: weft.gather\(1.0\)"
    )
    assert re.search(gather, outcome.out)
    assert "all ranks have been through an epoch" in outcome.out
    assert place_of(outcome.err, 0) == ("weft.barrier", line_of("weft.barrier()"))
    assert place_of(outcome.err, 1)[1] == line_of("model(torch.ones(2, 4)).mean().backward()")


def test_one_that_breaks_out_of_an_epoch_is_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    told = launch(capfd, "break").err
    assert "ranks are out of step: they are in different calls" in told
    assert {place_of(told, rank)[0] for rank in range(2)} >= {"backward"}


def test_one_that_exits_early_is_named_by_those_who_wait(capfd: pytest.CaptureFixture[str]) -> None:
    told = launch(capfd, "exit").err
    assert "the script has ended on rank 1, and others wait" in told
    assert place_of(told, 0) == ("backward", line_of("model(x).mean().backward()"))
    assert place_of(told, 1) == place_of(told, 0) and "\n  rank 1 has ended" in told
