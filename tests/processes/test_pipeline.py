"""A pipeline of real processes, one of which is killed in the middle of a schedule: the others end, and name it."""

import pytest

from tests.processes.ranks import run_processes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared_memory", "torch"])
@pytest.mark.parametrize("schedule", ["1f1b(4)", "zero_bubble(4)"])
def test_a_stage_that_is_killed_ends_the_others(kind: str, schedule: str) -> None:
    found = run_processes(
        "tests.processes.pipeline:train_or_lose",
        3,
        kind=kind,
        plan=f"pipeline=3 schedule={schedule}",
        rank=1,
        at_call=40,
    )
    assert found == ["lost 1", None, "lost 1"]
