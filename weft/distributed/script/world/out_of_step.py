"""Whether ranks are out of step, from what each of them reports, and how that is told.

    call     1        2          3
    rank 0   weave    backward   weft.mean       waits      out of step: the third call of both is not the same
    rank 1   weave    backward   backward        waits

    rank 0   weave    backward   backward        waits      in step: rank 1 is late
    rank 1   weave    backward                   works

    rank 0   weave    backward   backward        waits      out of step: the third call of rank 1 never comes
    rank 1   weave    backward                   ended

That two calls of one number differ is proof whenever it is seen: no report needs to be fresh.
"""

from collections.abc import Iterable, Mapping, Sequence

from weft.distributed.script.world.whereabouts import NotedCall, RankReport

__all__ = ["find_out_of_step", "name_ranks", "tell_differing_facts", "tell_failed", "tell_reports", "tell_stuck"]

Facts = Mapping[str, str]

CURE = "make all ranks make the same calls, in the same order and equally often"
MOST_TOLD = 16


def find_out_of_step(reports: Mapping[int, RankReport]) -> str | None:
    """The fact, and where each rank is; None where ranks that wait have reason to."""
    waiting = [report for report in reports.values() if report.state == "waits" and report.calls[-1].number]
    for report in waiting:
        number = report.calls[-1].number
        kinds = {other.kind_of(number) or report.calls[-1].kind for other in reports.values()}
        if len(kinds) > 1:
            return tell_reports("ranks are out of step: they are in different calls", reports.values())
        ended = [other.rank for other in reports.values() if other.state == "ended" and other.number < number]
        if ended:
            fact = f"ranks are out of step: the script has ended on {name_ranks(ended)}, and others wait"
            return tell_reports(fact, reports.values())
    return None


def tell_stuck(reports: Mapping[int, RankReport], size: int) -> str | None:
    """For reports that have not changed for long: what is wrong where all ranks wait, and not in one kind of call."""
    if len(reports) < size or any(report.state != "waits" for report in reports.values()):
        return None
    if len({report.calls[-1].kind for report in reports.values()}) == 1:
        return None
    return tell_reports("ranks are out of step: all of them wait, and none goes on", reports.values())


def tell_failed(report: RankReport, waiter: RankReport) -> str:
    """For a rank that waited for one that failed."""
    waits = f"rank {waiter.rank} {_describe(waiter)}"
    return f"rank {report.rank} failed ({report.error}); {waits}; look at the error of rank {report.rank}"


def tell_reports(fact: str, reports: Iterable[RankReport]) -> str:
    """A fact, a line for the ranks that are in the same place each, and the cure."""
    alike: dict[str, list[RankReport]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        alike.setdefault(_describe(report), []).append(report)
    lines = [
        f"  {name_ranks([report.rank for report in each])} {_describe(each[0], is_one=len(each) == 1)}"
        for each in alike.values()
    ]
    return "\n".join([fact, *_cut(lines), CURE])


def tell_differing_facts(calls: Sequence[NotedCall], facts: Sequence[Facts], *, same_line: bool) -> str:
    """For ranks that met in one call, each with its own (in rank order): the first difference between two of them.

    Args:
        same_line: whether a line of the script that differs is one.
    """
    keys = [_key(call, own, same_line=same_line) for call, own in zip(calls, facts, strict=True)]
    other = next(rank for rank, key in enumerate(keys) if key != keys[0])
    fact = f"ranks are out of step: {_first_difference(calls, facts, other)}"
    ranks_at: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_at.setdefault(f"in {call.kind} at {call.line}", []).append(rank)
    lines = [f"  {name_ranks(ranks)} {place}" for place, ranks in ranks_at.items()]
    return "\n".join([fact, *_cut(lines), _cure_for(calls, facts, other)])


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in rising order, in words.

    >>> name_ranks([3]), name_ranks([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(words)}"


def _key(call: NotedCall, facts: Facts, *, same_line: bool) -> tuple[object, ...]:
    return (call.kind, tuple(facts.items()), (call.line.line, call.line.function) if same_line else None)


def _first_difference(calls: Sequence[NotedCall], facts: Sequence[Facts], other: int) -> str:
    if calls[0].kind != calls[other].kind:
        return f"rank 0 is in {calls[0].kind}, rank {other} in {calls[other].kind}"
    here, there = tuple(facts[0].items()), tuple(facts[other].items())
    for at in range(max(len(here), len(there))):
        mine, its = (rows[at] if at < len(rows) else None for rows in (here, there))
        if mine == its:
            continue
        if mine and its and mine[0] == its[0]:
            return f"{mine[0]} is {mine[1]} on rank 0, {its[1]} on rank {other}"
        return f"{_name(mine)} on rank 0, {_name(its)} on rank {other} in its place"
    return f"{calls[0].kind} is called at two places of the script"


def _name(row: tuple[str, str] | None) -> str:
    return "nothing" if row is None else f"{row[0]} ({row[1]})"


def _cure_for(calls: Sequence[NotedCall], facts: Sequence[Facts], other: int) -> str:
    is_same_kind = calls[0].kind == calls[other].kind
    return "give all ranks the same" if is_same_kind and dict(facts[0]) != dict(facts[other]) else CURE


def _describe(report: RankReport, *, is_one: bool = True) -> str:
    """`waits in backward at train.py:12: loss.backward() (calls: weft.weave 1, backward 6)`, of one rank or more."""
    last = f"{report.calls[-1].kind} at {report.calls[-1].line}" if report.calls else "none"
    calls = ", ".join(f"{kind} {count}" for kind, count in report.counts)
    counted = f" (calls: {calls})" if calls else ""
    if report.state == "waits":
        return f"{'waits' if is_one else 'wait'} in {last}{counted}"
    one, more = {
        "works": ("works", "work"),
        "ended": ("has ended", "have ended"),
        "failed": (f"failed ({report.error})",) * 2,
    }[report.state]
    return f"{one if is_one else more}; {'its' if is_one else 'their'} last call was {last}{counted}"


def _cut(lines: list[str]) -> list[str]:
    return lines[:MOST_TOLD] + ([f"  and {len(lines) - MOST_TOLD} more places"] if len(lines) > MOST_TOLD else [])
