"""What must hold between the records of host servers and those of the shards behind them."""

from collections.abc import Iterator, Sequence

from weft.distributed.consistency.server.decisions import Commit, Decision, Push, Release

__all__ = ["audit_hosts"]


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
