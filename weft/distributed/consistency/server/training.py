"""One training on one shard, from its beginning to the next or to the end: what a server keeps besides its mailbox."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.server.decisions import Decision, Push, Release
from weft.distributed.consistency.server.journal import Journal, Summary, journal_file
from weft.distributed.consistency.server.kept import Kept, Recalled, keep
from weft.distributed.consistency.server.lent import Lent
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.consistency.server.protocol import InitHeader, host_address
from weft.distributed.consistency.server.shard import Contribution, Form, Rate, Shard
from weft.distributed.consistency.server.sums import Sums
from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox import AbstractMailbox
from weft.training.optimizers import AbstractOptimizer, OptimizerState, Shared

__all__ = ["ServerSpec", "Training"]

KEEP_SECONDS = 5.0
"""From one snapshot of the shard to the next."""


@dataclass(frozen=True)
class ServerSpec:
    """What a server is for.

    Args:
        make_policy: for the seed of a training, and whether it begins (or a lost shard is restored).
        make_optimizer: for the shard's part of all elements.
        num_shards: of the plan; host servers have the addresses after them.
        inner: ranks to a host server; 1 where there are none.
        alpha: how far a visitor draws the centre towards itself, where the form is elastic.
        run: the run folder, where decisions are recorded; None to record nothing.
        kept: where snapshots of the shard go, and are looked for; None to keep none.
    """

    shard: int
    num_workers: int
    plan: str
    rate: Rate
    make_policy: Callable[[int, bool], AbstractPolicy]
    make_optimizer: Callable[[float], AbstractOptimizer]
    form: Form = "gradient"
    num_shards: int = 1
    inner: int = 1
    alpha: float = 0.0
    run: Path | None = None
    kept: Path | None = None

    @property
    def hosts(self) -> range:
        """The addresses of host servers."""
        first = host_address(self.num_workers, self.num_shards, 0)
        return range(first, first + (-(-self.num_workers // self.inner) if self.inner > 1 else 0))

    def host_of(self, rank: int) -> int:
        """The address of a rank's host server."""
        return host_address(self.num_workers, self.num_shards, rank // self.inner)

    def are_of_host(self, ranks: Sequence[int], address: int) -> bool:
        """Whether these are ranks of the host server with this address."""
        return all(rank < self.num_workers and self.host_of(rank) == address for rank in ranks)


@final
class Training:
    """Weights, what ranks were told, what they have pushed, and the record of it all."""

    def __init__(
        self,
        mailbox: AbstractMailbox,
        spec: ServerSpec,
        header: InitHeader,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        is_fresh: bool = True,
    ) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._lent = Lent()
        self._kept_at = -math.inf
        self._journal: Journal | None = None
        self.header = header
        self.buffers = tuple(buffers)
        self.shard = self._make_shard(weights)
        self.policy = spec.make_policy(header.seed, is_fresh)
        self.parts: dict[int, tuple[int, tuple[Tensor, ...]]] = {}
        self.pending: dict[Push, Contribution] = {}
        self.joined: dict[tuple[Push, ...], Contribution] = {}  # what host servers forwarded
        self.forwards: dict[tuple[int, int], int] = {}  # the last number, by address and incarnation
        self.behind: dict[int, int] = {}  # ranks whose answer goes to a host server -> its address
        self.told: dict[int, Release] = {}  # what each rank was last let go with; nothing while it waits
        self.last_step: dict[int, int] = {}
        self.met: set[int] = set()  # ranks that this server has let go before
        self.ended: set[int] = set()  # ranks that take no more steps
        self.greeted: set[int] = set()  # ranks whose answer is a welcome
        self.content: set[int] = set()  # ranks whose answer needs no weights
        self.found: dict[int, tuple[Tensor, ...]] = {}  # the centre as a visitor found it, which is its answer
        self.sums = Sums()
        self.num_dropped = 0
        self.restored_at: int | None = None  # the version with which it took the place of a server that was lost
        self.num_lost = 0
        self.num_returned = 0

    def _make_shard(self, weights: Sequence[Tensor]) -> Shard:
        places = self._make_places(weights)
        for place, weight in zip(places, weights, strict=True):
            place.copy_(weight)
        return Shard(
            places,
            self._spec.make_optimizer(self.header.fraction),
            rate=self._spec.rate,
            form=self._spec.form,
            alpha=self._spec.alpha,
            num_workers=self._spec.num_workers,
            clip_norm=self.header.clip_norm,
        )

    def _make_places(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Memory that workers on this host read in place."""
        return tuple(self._mailbox.empty(tuple(weight.shape), weight.dtype) for weight in weights)

    # Beginning and end.

    def begin(self, slots: Sequence[Tensor]) -> None:
        """Start as rank 0 says; optimizer state comes from a checkpoint."""
        named: dict[str, dict[str, Tensor]] = {}
        for (index, name), tensor in zip(self.header.slots, slots, strict=True):
            named.setdefault(str(index), {})[name] = tensor
        if named or self.header.updates:
            state = _with_slots(self.shard.state, named, self.header.updates)
            self.shard.restore(self.shard.weights, state, version=0)
        self._journal = self._open_journal(goes_on=False)
        self.keep(is_due=True)

    def restore(self, found: Recalled) -> None:
        """Go on where a server of the same shard was."""
        self.shard.restore(
            found.weights, _with_slots(self.shard.state, found.slots, found.updates), version=found.version
        )
        self.restored_at = found.version
        self._journal = self._open_journal(goes_on=True)
        if self._journal is not None:
            self._journal.restored(found.version)

    def end(self, summary: Summary) -> None:
        if self._journal is not None:
            self._journal.end(summary)
            self._journal = None

    def _open_journal(self, *, goes_on: bool) -> Journal | None:
        spec, header = self._spec, self.header
        if spec.run is None:
            return None
        about: dict[str, object] = {"plan": spec.plan, "workers": spec.num_workers}
        about |= {"shard": spec.shard, "seed": header.seed, "updates": header.updates}
        path = journal_file(spec.run, header.seed, spec.shard)
        return Journal(path, about, goes_on=goes_on, clock=self._mailbox.clock.now)

    # Updates.

    def expects(self, rank: int, step: int) -> bool:
        """Whether a rank was let go and has not pushed since."""
        return rank in self.told and step > self.last_step.get(rank, -1)

    def take_version(self, rank: int, step: int) -> int:
        """Of the weights that a push was computed on; from now on the rank waits."""
        self.last_step[rank] = step
        version = self.told.pop(rank).version
        assert version is not None, "a server fills it in"
        return version

    def commit(self, pushes: Sequence[Push]) -> None:
        """One update. Weights that are still being sent, or that a visitor is to be sent, stay as they are, and the
        update is made on a copy."""
        weights = self.shard.weights
        is_read = self._lent.is_read(weights)
        if self._spec.form == "elastic":
            self.found |= {rank: weights for rank, _ in pushes}
        if is_read or self._spec.form == "elastic":
            self.shard.move_to(self._lent.take_free() or self._make_places(weights))
        joined = self.joined.pop(tuple(pushes), None)
        self.shard.commit([self.pending.pop(push) for push in pushes] if joined is None else [joined])
        self.keep(is_due=self._mailbox.clock.now() - self._kept_at >= KEEP_SECONDS)

    def lend(self, weights: tuple[Tensor, ...], work: AbstractWork) -> None:
        """Leave these weights as they are until the work has read them."""
        self._lent.lend(weights, work)

    def note(self, decision: Decision) -> None:
        if self._journal is not None:
            self._journal.note(decision)

    def keep(self, *, is_due: bool) -> None:
        if self._spec.kept is not None and is_due:
            keep(self._spec.kept, Kept(self.header, self.shard, self.buffers))
            self._kept_at = self._mailbox.clock.now()

    def summary(self, refused: Mapping[str, int]) -> Summary:
        ages = self.shard.staleness
        return Summary(
            updates=self.shard.version,
            staleness=tuple(ages[age] for age in range(max(ages, default=-1) + 1)),
            dropped=self.num_dropped,
            refused=dict(refused),
            lost=self.num_lost,
            returned=self.num_returned,
        )


def _with_slots(state: OptimizerState, slots: dict[str, dict[str, Tensor]], updates: int) -> OptimizerState:
    shared = Shared(lr=state.shared.lr, step=torch.tensor(float(updates), dtype=torch.float64))
    return OptimizerState(shared, {name: slots.get(name, own) for name, own in state.slots.items()})
