"""When ranks are out of step, by their reports alone."""

import pytest

from weft.distributed.script.world.out_of_step import find_out_of_step, name_ranks, tell_differing_facts, tell_stuck
from weft.distributed.script.world.whereabouts import NotedCall, RankReport, RankState, Whereabouts
from weft.script_lines import ScriptLine


def report(rank: int, state: RankState, *kinds: str, first: int = 1) -> RankReport:
    calls = [
        NotedCall(first + at, kind, ScriptLine("train.py", 10 + at, "main", kind)) for at, kind in enumerate(kinds)
    ]
    return RankReport(rank, state, tuple(calls), (("backward", kinds.count("backward")),))


def finding(*reports: RankReport) -> str | None:
    return find_out_of_step({one.rank: one for one in reports})


def test_ranks_that_wait_in_different_calls_of_one_number_are_out_of_step() -> None:
    text = finding(report(0, "waits", "backward", "weft.mean"), report(1, "waits", "backward", "backward"))
    assert text is not None and text.splitlines() == [
        "ranks are out of step: they are in different calls",
        "  rank 0 waits in weft.mean at train.py:11 in main: weft.mean (calls: backward 1)",
        "  rank 1 waits in backward at train.py:11 in main: backward (calls: backward 2)",
        "make all ranks make the same calls, in the same order and equally often",
    ]


def test_one_that_went_on_from_another_call_of_that_number_is_found_too() -> None:
    """A root of a broadcast does not wait for anybody: it may be calls ahead before it waits, or be computing."""
    assert finding(report(0, "works", "broadcast", "backward"), report(1, "waits", "backward"))


@pytest.mark.parametrize(
    "reports",
    [
        (report(0, "waits", "backward", "backward"), report(1, "works", "backward")),
        (report(0, "waits", "backward", "backward"), report(1, "waits", "backward", "backward")),
        (report(0, "waits", "backward"), report(1, "waits", "backward", "weft.mean")),
        (report(0, "waits", "backward"), report(1, "ended", "backward", "weft.mean")),
        (report(0, "waits", "backward"),),
        (report(0, "waits", "weft.mean", first=0), report(1, "ended")),  # at its own pace: it has no number
        (report(0, "waits", "backward"), report(1, "failed")),  # the failure is the cause
    ],
    ids=["late", "in one call", "a call behind", "ended after it", "not heard of", "own pace", "failed"],
)
def test_ranks_that_have_reason_to_wait(reports: tuple[RankReport, ...]) -> None:
    assert finding(*reports) is None


def test_one_that_has_ended_is_named_with_its_last_call() -> None:
    text = finding(report(0, "waits", "backward", "backward"), report(1, "ended", "backward"), report(2, "ended"))
    assert text is not None
    assert text.startswith("ranks are out of step: the script has ended on ranks 1-2, and others wait\n")
    assert "\n  rank 1 has ended; its last call was backward at train.py:10 in main: backward" in text
    assert "\n  rank 2 has ended; its last call was none" in text


def test_ranks_in_one_place_are_told_in_one_line() -> None:
    same = [report(rank, "waits", "backward") for rank in (0, 1, 2, 5)]
    text = finding(*same, report(3, "waits", "weft.mean"))
    assert text is not None and text.splitlines()[1].startswith("  ranks 0-2, 5 wait in backward at")
    assert name_ranks([4]) == "rank 4"


def test_no_movement_for_long_is_told_where_all_wait_and_not_in_one_kind() -> None:
    own_pace, meeting = report(0, "waits", "optimizer.step", first=0), report(1, "waits", "weft.mean")
    assert tell_stuck({0: own_pace, 1: meeting}, 2)
    assert tell_stuck({0: own_pace, 1: meeting}, 3) is None
    assert tell_stuck({0: own_pace, 1: report(1, "works", "weft.mean")}, 2) is None
    assert tell_stuck({0: own_pace, 1: report(1, "waits", "optimizer.step", first=0)}, 2) is None


HERE = ScriptLine("train.py", 5, "<module>", "weave()")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"a": "1", "b": "3"}, "b is 2 on rank 0, 3 on rank 1"),
        ({"a": "1"}, "b (2) on rank 0, nothing on rank 1 in its place"),
        ({"b": "2", "a": "1"}, "a (1) on rank 0, b (2) on rank 1 in its place"),
        ({"a": "1", "b": "2", "c": "4"}, "nothing on rank 0, c (4) on rank 1 in its place"),
    ],
    ids=["value", "one less", "order", "one more"],
)
def test_the_first_fact_that_differs_is_named(there: dict[str, str], expected: str) -> None:
    calls, here = [NotedCall(0, "weft.weave", HERE)] * 2, {"a": "1", "b": "2"}
    text = tell_differing_facts(calls, [here, there], same_line=False)
    assert text.splitlines()[0] == f"ranks are out of step: {expected}"
    assert "  ranks 0-1 in weft.weave at train.py:5: weave()" in text


def test_the_same_call_at_two_lines_is_told_as_that() -> None:
    calls = [NotedCall(0, "weft.mean", ScriptLine("train.py", line, "main", "weft.mean(x)")) for line in (5, 5, 9)]
    text = tell_differing_facts(calls, [{}] * 3, same_line=True)
    assert text.splitlines()[0] == "ranks are out of step: weft.mean is called at two places of the script"
    assert "ranks 0-1 in weft.mean at train.py:5" in text and "rank 2 in weft.mean at train.py:9" in text


def test_a_report_is_what_it_was_after_its_way_through_the_store() -> None:
    own = Whereabouts()
    before = own.begin("weft.weave")
    own.end(before)
    own.begin("optimizer.step", together=False)
    told = own.report(3, "failed", "ValueError: {}")
    assert RankReport.decode(told.encode()) == told
    assert [(call.number, call.kind) for call in told.calls] == [(1, "weft.weave"), (0, "optimizer.step")]
    assert told.number == 1 and told.calls[0].line.text == 'before = own.begin("weft.weave")'
