"""Audits of what ranks and servers recorded: rules that must hold, whatever policy decided."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from weft.distributed.consistency.pairs.events import NOBODY, Deal, Event, Mix, Pair, Step
from weft.distributed.consistency.server.decisions import Commit, Decision, Drop, Join, Leave, Push, Release
from weft.distributed.consistency.server.policy import NEVER
from weft.planning.gossip_graphs import Split

__all__ = ["audit_arrival", "audit_hosts", "audit_pairs", "audit_rounds"]


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


def audit_hosts(hosts: Sequence[Sequence[Decision]], shards: Sequence[Sequence[Decision]], inner: int) -> list[str]:
    """The faults, in words; none is a pass. Every shard made one update of each push that a host server forwarded, in
    its order, of the same gradients; and every rank was told to take the step that shard 0 gave it."""
    faults: list[str] = []
    for number, host in enumerate(hosts):
        faults += _audit_joins(number, host, inner)
        for shard, decisions in enumerate(shards):
            faults += _compare(number, host, shard, [p for p in _commits(decisions) if p[0][0] // inner == number])
    return [*faults, *_audit_steps(hosts, shards[0])]


def _audit_joins(number: int, decisions: Sequence[Decision], inner: int) -> Iterator[str]:
    joined: set[Push] = set()
    for pushes in _commits(decisions):
        for rank, step in pushes:
            if rank // inner != number:
                yield f"host server {number} joined a gradient of rank {rank}, which is of another host"
            if (rank, step) in joined:
                yield f"host server {number} joined the gradient of rank {rank} for step {step} twice"
            joined.add((rank, step))


def _compare(number: int, host: Sequence[Decision], shard: int, used: Sequence[tuple[Push, ...]]) -> Iterator[str]:
    forwarded = _commits(host)
    for sent, taken in zip(forwarded, used, strict=False):
        if sent != taken:
            yield f"host server {number} joined {_spell(sent)}, and shard {shard} used {_spell(taken)}"
            return
    if len(used) < len(forwarded):
        lost = forwarded[len(used)]
        yield f"gradients were lost between host server {number} and shard {shard} ({_spell(lost)})"
    elif len(used) > len(forwarded):
        extra = used[len(forwarded)]
        yield f"shard {shard} used gradients that host server {number} did not forward ({_spell(extra)})"


def _audit_steps(hosts: Sequence[Sequence[Decision]], dealer: Sequence[Decision]) -> Iterator[str]:
    """A rank's first step comes from the shards themselves, the others through its host server."""
    given = _steps(dealer)
    for number, decisions in enumerate(hosts):
        for rank, steps in _steps(decisions).items():
            if given.get(rank, [])[1 : len(steps) + 1] != steps:
                yield f"host server {number} told rank {rank} to take other steps than shard 0 gave it"


def _commits(decisions: Sequence[Decision]) -> list[tuple[Push, ...]]:
    return [decision.pushes for decision in decisions if isinstance(decision, Commit)]


def _steps(decisions: Sequence[Decision]) -> dict[int, list[tuple[int, bool]]]:
    steps: dict[int, list[tuple[int, bool]]] = {}
    for decision in decisions:
        if isinstance(decision, Release):
            steps.setdefault(decision.rank, []).append((decision.step, decision.stop))
    return steps


def _spell(pushes: Sequence[Push]) -> str:
    """
    >>> _spell([(0, 4), (1, 5)])
    'rank 0 step 4, rank 1 step 5'
    """
    return ", ".join(f"rank {rank} step {step}" for rank, step in pushes)


def audit_pairs(journals: Sequence[Sequence[Event]], split: Split) -> list[str]:
    """The faults in what all ranks recorded, in words; none is a pass."""
    return list(_audit_pairs(journals, split))


def _audit_pairs(journals: Sequence[Sequence[Event]], split: Split) -> Iterator[str]:
    answered = {(e.rank, e.turn, rank) for rank, events in enumerate(journals) for e in events if isinstance(e, Pair)}
    taken = Counter(event.work for events in journals for event in events if isinstance(event, Deal) and not event.stop)
    yield from (f"piece {work} of the work was given out {times} times" for work, times in taken.items() if times > 1)
    for rank, events in enumerate(journals):
        turns = [event.turn for event in events if isinstance(event, Step | Mix)]
        if turns != list(range(len(turns))):
            yield f"rank {rank} did not take its turns one after the other"
        came = [(event.rank, event.turn) for event in events if isinstance(event, Pair)]
        if split.asks[rank] and came:
            yield f"rank {rank} was asked, and asks itself"
        if len(set(came)) < len(came):
            yield f"rank {rank} was asked twice in one turn of another"
        for event in events:
            if (
                isinstance(event, Step)
                and event.partner != NOBODY
                and (rank, event.turn, event.partner) not in answered
            ):
                pair = f"rank {rank} has the mean with rank {event.partner} in turn {event.turn}"
                yield f"{pair}, which knows nothing of it"
