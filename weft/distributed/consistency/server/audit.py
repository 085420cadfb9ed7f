"""What must hold of the decisions of a shard, read from its record: the judge knows no policy."""

from collections.abc import Iterable, Iterator

from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Leave, Release
from weft.distributed.consistency.server.policy import NEVER

__all__ = ["audit_arrival", "audit_rounds"]


def audit_arrival(
    decisions: Iterable[Decision], num_workers: int, bound: float = NEVER, *, shard: int = 0, inner: int = 1
) -> list[str]:
    """The faults of a shard that updates as gradients arrive, in words; none is a pass. Shard 0 deals out the work; an
    update may be made of gradients of one host, with `inner` ranks to each."""
    return list(_audit_arrival(list(decisions), num_workers, bound, inner, is_dealer=shard == 0))


def audit_rounds(
    decisions: Iterable[Decision],
    num_workers: int,
    *,
    bound: int = 0,
    spare: int = 0,
    has_deadline: bool = False,
    shard: int = 0,
) -> list[str]:
    """The faults of a shard that updates in rounds, in words; none is a pass. Ranks take the steps that shard 0 gives
    them; at another, which closed a round sooner, such a step is late."""
    ordered = list(decisions)
    return [
        *_audit_order(ordered, is_dealer=shard == 0),
        *_audit_rounds(ordered, num_workers, bound, spare, has_deadline),
    ]


def _audit_arrival(
    decisions: list[Decision], num_workers: int, bound: float, inner: int, *, is_dealer: bool
) -> Iterator[str]:
    yield from _audit_order(decisions, is_dealer=is_dealer)
    clocks = dict.fromkeys(range(num_workers), 0)
    for decision in decisions:
        match decision:
            case Commit(pushes):
                if len(pushes) > 1 and len({rank // inner for rank, _ in pushes}) > 1:
                    yield f"an update was made of several gradients ({decision})"
                for rank, _ in pushes:
                    clocks[rank] = clocks.get(rank, 0) + 1
            case Release(rank, _, stop=False) if rank in clocks:
                ahead = clocks[rank] - min(clocks.values())
                if ahead > bound:
                    yield f"rank {rank} was let go {ahead} steps ahead of the slowest (bound: {bound:g})"
            case Drop():
                yield f"a gradient was dropped ({decision})"
            case Leave(rank):
                clocks.pop(rank, None)
            case Join(rank):
                clocks[rank] = min(clocks.values(), default=0)


def _audit_rounds(
    decisions: list[Decision], num_workers: int, bound: int, spare: int, has_deadline: bool
) -> Iterator[str]:
    members, open_round = set(range(num_workers)), 0
    for decision in decisions:
        match decision:
            case Commit(pushes):
                ranks, steps = [rank for rank, _ in pushes], {step for _, step in pushes}
                if ranks != sorted(ranks):
                    yield f"gradients were not added in the order of ranks ({decision})"
                if len(steps) > 1 or min(steps) < open_round:
                    yield f"a late gradient was not dropped (open round: {open_round}, {decision})"
                missing = len(members.difference(ranks))
                if missing > max(0, len(members) - (num_workers - spare)) and not has_deadline:
                    yield f"round {min(steps)} was closed without {missing} ranks (spare: {spare})"
                open_round = max(open_round, max(steps) + 1)
            case Release(rank, step, stop=False) if step > open_round + bound:
                yield f"rank {rank} was let go to step {step} while round {open_round} is open (bound: {bound})"
            case Drop(rank, step) if step >= open_round:
                yield f"a gradient was dropped in time ({decision}, open round: {open_round})"
            case Leave(rank):
                members.discard(rank)
            case Join(rank):
                members.add(rank)


def _audit_order(decisions: list[Decision], *, is_dealer: bool) -> Iterator[str]:
    """Every gradient once, for a step that its rank was told to take; versions count the updates."""
    version = 0
    told: set[tuple[int, int]] = set()  # rank, and a step that it was to take
    settled: set[tuple[int, int]] = set()
    for decision in decisions:
        match decision:
            case Commit() | Drop():
                pushes = decision.pushes if isinstance(decision, Commit) else ((decision.rank, decision.step),)
                for push in pushes:
                    if push in settled:
                        yield f"the gradient of rank {push[0]} for step {push[1]} was used twice"
                    elif push not in told and is_dealer:
                        yield f"rank {push[0]} pushed step {push[1]}, and was never told to take it"
                    settled.add(push)
                version += isinstance(decision, Commit)
            case Release(rank, step, version=found):
                told.add((rank, step))
                if found is not None and found != version:
                    yield f"rank {rank} got version {found} after {version} updates"
