"""The specification of a server, and the state of a training on its shard: weights, optimizer state, snapshots."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from weft.distributed.codecs import decode_all
from weft.distributed.consistency.control import MalformedError
from weft.distributed.consistency.server.policy import AbstractPolicy
from weft.distributed.consistency.server.protocol import InitHeader, Tag
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.consistency.server.shard import Contribution, Shard
from weft.distributed.consistency.server.snapshot import Snapshot, write_snapshot
from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox import AbstractMailbox
from weft.errors import EncodingError
from weft.training.optimizers import AbstractOptimizer, OptimizerState, Shared

__all__ = ["InFlight", "ServerSpec", "ShardState"]

SNAPSHOT_SECONDS = 5.0
"""From one snapshot of the shard to the next."""


@dataclass(frozen=True)
class ServerSpec:
    """The specification of a server.

    Args:
        make_policy: for the seed of a training, and whether it begins (or a lost shard is restored).
        make_optimizer: for the shard's part of all elements.
        tune: an optimizer that was made, to the settings of a push; None where it has none but the learning rate.
        run: the run folder, where decisions are recorded; None to record nothing.
        snapshot: where snapshots of the shard go, and are looked for; None for none.
    """

    shard: int
    plan: str
    settings: Settings
    make_policy: Callable[[int, bool], AbstractPolicy]
    make_optimizer: Callable[[float], AbstractOptimizer]
    tune: Callable[[str | None], None] | None = None
    run: Path | None = None
    snapshot: Path | None = None


@final
class InFlight:
    """Weights in flight to workers, which an update must not touch: it needs other memory to be made in.

    weights A   sent to rank 0 ~~~~~~~~~~~> read          an update comes while A is read: it is made on B,
    weights B             updated, sent to rank 1 ~~~>    and A, once it has been read, takes the next
    """

    def __init__(self) -> None:
        self._read: list[tuple[tuple[Tensor, ...], list[AbstractWork]]] = []
        self._free: list[tuple[Tensor, ...]] = []

    def add(self, weights: tuple[Tensor, ...], work: AbstractWork) -> None:
        """A send reads these weights."""
        for known, works in self._read:
            if _are_same(known, weights):
                works.append(work)
                return
        self._read.append((weights, [work]))

    def is_read(self, weights: tuple[Tensor, ...]) -> bool:
        """Whether some send still reads these; sets that are read no more are free from now on."""
        still = []
        for known, works in self._read:
            left = [work for work in works if not work.is_done()]
            if left:
                still.append((known, left))
            elif not _are_same(known, weights):
                self._free.append(known)
        self._read = still
        return any(_are_same(known, weights) for known, _ in still)

    def take_free(self) -> tuple[Tensor, ...] | None:
        """A set that may be written to; None where a new one is needed."""
        return self._free.pop() if self._free else None


def _are_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(a is b for a, b in zip(first, second, strict=True))


@final
class ShardState:
    """A shard in one training, where its weights lie in memory, and its snapshots.

    Args:
        header: how the training began.
        buffers: what rank 0 began with besides the trained parameters, for ranks that come.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        spec: ServerSpec,
        header: InitHeader,
        weights: Sequence[Tensor],
        buffers: Sequence[Tensor],
    ) -> None:
        self._mailbox = mailbox
        self._spec = spec
        self._in_flight = InFlight()
        self._codec = spec.settings.make_codec()
        self._weights_codec = spec.settings.make_weights_codec()
        # Version and weights that were encoded last, and as what.
        self._encoded: tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        self._saved_at = -math.inf
        self.header = header
        self.buffers = tuple(buffers)
        memory = self._make_memory(weights)
        for place, weight in zip(memory, weights, strict=True):
            place.copy_(weight)
        self.shard = Shard(
            memory,
            spec.make_optimizer(header.fraction),
            rate=spec.settings.rate,
            form=spec.settings.form,
            alpha=spec.settings.alpha,
            num_workers=spec.settings.num_workers,
            clip_norm=None if header.positions else header.clip_norm,
            codec=self._weights_codec,
        )

    def _make_memory(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Which workers on this host read in place."""
        return tuple(self._mailbox.empty(tuple(weight.shape), weight.dtype) for weight in weights)

    # Beginning.

    def begin(self, slots: Sequence[Tensor]) -> None:
        """Start as rank 0 says; optimizer state comes from a checkpoint."""
        named: dict[str, dict[str, Tensor]] = {}
        for (index, name), tensor in zip(self.header.slots, slots, strict=True):
            named.setdefault(str(index), {})[name] = tensor
        if named or self.header.updates:
            self._restore(self.shard.weights, named, self.header.updates, version=0)
        self.save(is_due=True)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on where a server of the same shard was."""
        self._restore(snapshot.weights, snapshot.slots, snapshot.updates, snapshot.version)

    def _restore(
        self, weights: Sequence[Tensor], slots: Mapping[str, Mapping[str, Tensor]], updates: int, version: int
    ) -> None:
        before = self.shard.state
        shared = Shared(lr=before.shared.lr, step=torch.tensor(float(updates), dtype=torch.float64))
        state = OptimizerState(shared, {name: slots.get(name, own) for name, own in before.slots.items()})
        self.shard.restore(weights, state, version)

    # Updates.

    def commit(self, contributions: Sequence[Contribution], clip_factor: Tensor | None = None) -> float | None:
        """One update. Weights that are still being sent, or that a rank is to be sent, stay as they are, and the update
        is made on a copy."""
        weights = self.shard.weights
        is_read = self._in_flight.is_read(weights)
        if is_read or self._spec.settings.form == "weights":
            self.shard.move_to(self._in_flight.take_free() or self._make_memory(weights))
        if self._spec.tune is not None:
            self._spec.tune(contributions[0].settings)
        loss = self.shard.commit(contributions, clip_factor)
        self.save(is_due=self._mailbox.clock.now() - self._saved_at >= SNAPSHOT_SECONDS)
        return loss

    def save(self, *, is_due: bool) -> None:
        """Write a snapshot, if they are kept at all."""
        if self._spec.snapshot is not None and is_due:
            shard, updates = self.shard, int(self.shard.state.shared.step)
            snapshot = Snapshot(self.header, shard.weights, shard.state.slots, self.buffers, shard.version, updates)
            write_snapshot(self._spec.snapshot, snapshot)
            self._saved_at = self._mailbox.clock.now()

    # What others are sent, without waiting: whoever is gone, or slow to listen, holds up nobody.

    def send_weights(
        self, to: int, tag: Tag, header: Mapping[str, Any], weights: tuple[Tensor, ...], more: Sequence[Tensor] = ()
    ) -> None:
        """To ranks that are to compute on them: encoded."""
        if self._weights_codec.is_exact or not weights:
            self.send_exact(to, tag, header, weights, more)
        else:
            self._start_send(to, tag, header, [*self._encode(weights), *more])

    def send_exact(
        self, to: int, tag: Tag, header: Mapping[str, Any], weights: tuple[Tensor, ...], more: Sequence[Tensor] = ()
    ) -> None:
        """As they are; these weights stay so until they have been read."""
        work = self._start_send(to, tag, header, [*weights, *more])
        if weights:
            self._in_flight.add(weights, work)

    def _start_send(self, to: int, tag: Tag, header: Mapping[str, Any], tensors: Sequence[Tensor]) -> AbstractWork:
        about = {"run": self.header.run, "version": self.shard.version, **header}
        return self._mailbox.start_send(to, tag, about, tensors)

    def _encode(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Once for all ranks that are sent the same weights; what is in flight is never written to again."""
        version = self.shard.version
        if self._encoded is None or self._encoded[0] != version or not _are_same(self._encoded[1], weights):
            pairs = zip(self.shard.buckets, weights, strict=True)
            self._encoded = version, weights, tuple(self._weights_codec.encode(b, w) for b, w in pairs)
        return self._encoded[2]

    def decode(self, sent: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """A push, as the shard takes it. Raises MalformedError."""
        try:
            return decode_all(self._codec, self.shard.buckets, sent)
        except EncodingError:
            raise MalformedError("tensors") from None

    def send_optimizer_state(self, to: int) -> None:
        state = self.shard.state
        slots = [(int(name), slot, t) for name, own in state.slots.items() for slot, t in own.items()]
        header = {"slots": [[index, slot] for index, slot, _ in slots], "updates": int(state.shared.step)}
        header |= {"lr": float(state.shared.lr)}
        self._mailbox.start_send(to, Tag.STATE, header, [tensor.clone() for _, _, tensor in slots])
