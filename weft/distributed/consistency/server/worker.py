"""A worker of parameter servers: it pulls, computes and pushes, and waits for no other worker unless a server says so.

backward   [layer 3][layer 2][layer 1]
shard 1             =====>                  a shard's gradients set out as soon as its last one is there
shard 0                       =====>
answer                             <====    new weights of every shard, and which step to take next
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.server.cut import Piece, cut_evenly, put_together
from weft.distributed.consistency.server.journal import Summary
from weft.distributed.consistency.server.link import ShardLink
from weft.distributed.consistency.server.protocol import InitHeader, Tag, server_address
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.mailbox import AbstractMailbox
from weft.errors import PeerLostError
from weft.graph import GradientSink, State
from weft.training.checkpoint import Entry
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import OptimizerState, Shared
from weft.training.replicas import AbstractReplicas, Consensus, SoloReplicas, Traffic, Update
from weft.training.sampling import share

__all__ = ["ServedReplicas"]


@final
class ServedReplicas(AbstractReplicas):
    """One of the workers that train through servers. Rank 0 begins, evaluates and keeps the record.

    Ranks do not meet: `gather` gives a rank's own tensor alone, so that rank 0 can write a checkpoint by itself. `sum`
    is for those who have ended their loop, and waits for all that are left.

    Args:
        seeds: of the trainings to come, in order; what servers record is filed under them.
    """

    def __init__(self, mailbox: AbstractMailbox, settings: Settings, seeds: Sequence[int]) -> None:
        self._mailbox = mailbox
        self._settings = settings
        self._seeds = iter(seeds)
        self._seed = 0
        self._run = -1
        self._model = State({}, {}, torch.zeros(0))
        self._parameters: dict[str, Tensor] = {}
        self._links: list[ShardLink] = []
        self._has_ended = False
        self._num_sums = 0
        self._num_questions = 0
        self._turn = 0  # steps that this rank has taken
        self._gradients: dict[str, Tensor | None] = {}
        self._held: list[list[Tensor | None]] = []  # by shard, what waits for its turn
        self._weight = 0.0
        self._set_out_at: float | None = None  # when the first gradients of this step did
        self._early_bytes = 0
        self._traffic = Traffic()

    @property
    def rank(self) -> int:
        return self._mailbox.address

    @property
    def size(self) -> int:
        return self._settings.num_workers

    @property
    def is_synchronous(self) -> bool:
        return False

    # Beginning.

    def join(self, model: State) -> None:
        if self._links:
            self.sum(torch.zeros(1))  # nobody begins anew before all have ended
        self._run += 1
        self._seed = next(self._seeds)
        self._model = model
        self._parameters = {name: p.detach() for name, p in model.parameters.items() if p.requires_grad}
        cuts = cut_evenly(self._parameters, self._settings.num_shards, may_cut=self._settings.may_cut)
        addresses = [server_address(self.size, shard) for shard in range(len(cuts))]
        self._links = [
            ShardLink(self._mailbox, address, pieces, self._parameters)
            for address, pieces in zip(addresses, cuts, strict=True)
        ]
        self._held = [[None] * len(link.pieces) for link in self._links]
        self._has_ended, self._num_sums, self._turn = False, 0, 0
        self._mailbox.await_peers(addresses)
        if self.rank == 0:
            self._initialise({}, 0)
        self._greet(self._links, None)

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        """Rank 0 begins again, from the weights and the optimizer state of the checkpoint; so do the servers."""
        slots: dict[str, dict[str, Tensor]] = {}
        for key, entry in entries.items():
            if key.startswith("slot/"):
                name, _, slot = key.removeprefix("slot/").rpartition("/")
                slots.setdefault(name, {})[slot] = entry.parts[0]
        self.sum(torch.zeros(1))  # all have been let go once, and nobody begins before all have
        self._run, self._has_ended, self._num_sums = self._run + 1, False, 0
        if self.rank == 0:
            self._initialise(slots, int(entries["optimizer/step"].parts[0]))
        first = step * self.size if self._settings.deals_work else step
        self._greet(self._links, first)

    def _initialise(self, slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        total = sum(parameter.numel() for parameter in self._parameters.values())
        for number, link in enumerate(self._links):
            own = [
                (i, slot, piece.of(tensor) if tensor.shape == self._parameters[piece.name].shape else tensor)
                for i, piece in enumerate(link.pieces)
                for slot, tensor in slots.get(piece.name, {}).items()
            ]
            buffers = [buffer.detach() for buffer in self._model.buffers.values()] if number == 0 else []
            header = InitHeader(
                run=self._run,
                seed=self._seed,
                fraction=sum(piece.end - piece.begin for piece in link.pieces) / max(1, total),
                num_pieces=len(link.pieces),
                num_buffers=len(buffers),
                slots=tuple((index, slot) for index, slot, _ in own),
                updates=updates,
                clip_norm=None if self._settings.clips_own else self._settings.clip_norm,
            )
            link.initialise(header, [*(tensor for _, _, tensor in own), *buffers])

    def _greet(self, links: Sequence[ShardLink], step: int | None) -> None:
        """Ask for weights, and wait for them."""
        for link in links:
            link.say_hello(self._run, step)
        for link in links:
            self._run, buffers = link.await_welcome()
            with torch.no_grad():
                for buffer, tensor in zip(self._model.buffers.values(), buffers, strict=False):
                    buffer.copy_(tensor)

    # Steps.

    @property
    def _step(self) -> int:
        """Shard 0 gives out the work."""
        return self._links[0].step

    def next_step(self, step: int) -> int:
        return self._settings.batch_of(self._step)

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self._settings.share_of(self.rank, self._step), self.size)

    def begin(self, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self._num_questions, self._set_out_at, self._early_bytes = 0, None, 0
        for link in self._links:
            link.begin()
        return self._add

    def _add(self, name: str, gradient: Tensor | None) -> None:
        """Send what a shard waits for as soon as it is all there; the last shard's goes with the rest, at the end."""
        self._gradients[name] = gradient
        for link in self._links:
            is_completed = link.is_completed_by(name)
            if is_completed and self._settings.is_sent_early and not all(one.is_complete for one in self._links):
                self._set_out_at = self._set_out_at or self._mailbox.clock.now()
                self._early_bytes += link.send_part(self._run, self._step, link.cut(self._gradients))

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        own, state = loss / self._weight if self._weight else 0.0, update.state
        if not math.isfinite(own):
            return own, state
        if self._settings.form == "difference":
            state = self._take_own_step(update)
        elif self._settings.clips_own and self._settings.clip_norm is not None:
            self._gradients = dict(clip_by_norm(self._in_order(), self._settings.clip_norm))
        waited = self._mailbox.clock.now()
        num_bytes = self._exchange(update.lr)
        exposed = self._mailbox.clock.now() - waited
        hidden = waited - self._set_out_at if self._set_out_at is not None else 0.0
        self._traffic = Traffic(exposed, hidden, num_bytes + self._early_bytes)
        return own, state

    def _exchange(self, lr: float) -> int:
        """Push to every shard whose turn it is, take its weights; how many bytes were sent."""
        step, num_bytes = self._step, 0
        due = [self._settings.is_due(shard, self._turn) for shard in range(len(self._links))]
        for shard, link in enumerate(self._links):
            self._hold(shard, link)
            if due[shard]:
                num_bytes += link.push(self._run, step, lr, self._weight, self._held[shard])
            elif shard == 0:  # it gives out the work, in every step
                nothing: list[Tensor | None] = [None] * len(link.pieces)
                link.push(self._run, step, lr, self._weight, nothing, wants=False)
        for shard, link in enumerate(self._links):
            if due[shard] or shard == 0:
                self._take_answer(link, step + 1, wants=due[shard])
            if due[shard]:
                self._held[shard] = [None] * len(link.pieces)
        self._turn += 1
        self._catch_up()
        return num_bytes

    def _hold(self, shard: int, link: ShardLink) -> None:
        """Gradients of a shard that is not reached in every step are added up until it is."""
        held = self._held[shard]
        for index, tensor in enumerate(link.cut(self._gradients)):
            before = held[index]
            held[index] = tensor if before is None else before if tensor is None else before + tensor

    def _catch_up(self) -> None:
        """Shards close rounds each by itself: weights of a shard that is behind shard 0 are asked for again."""
        behind = [link for link in self._links if link.step < self._step]
        if behind and not self._settings.deals_work and not self._links[0].is_stopped:
            self._greet(behind, self._step)

    def _take_own_step(self, update: Update) -> OptimizerState:
        """This rank's own optimizer makes the update; what is pushed is by how much it changed the weights."""
        before = {name: parameter.clone() for name, parameter in self._parameters.items()}
        state = update.apply(self._gradients)
        self._gradients = {n: p - before[n] for n, p in self._parameters.items() if self._gradients.get(n) is not None}
        return state

    def _in_order(self) -> dict[str, Tensor | None]:
        return {name: self._gradients.get(name) for name in self._parameters}

    def _take_answer(self, link: ShardLink, step: int, *, wants: bool) -> None:
        """Wait for an answer; of a server that is lost, for the one in its place, and go on with its weights."""
        try:
            link.await_weights(wants=wants)
        except PeerLostError:
            link.await_return()
            self._greet([link], step)

    def traffic(self) -> Traffic:
        return self._traffic

    # Decisions, and the end.

    def agree(self, wish: bool) -> bool:
        """The first question after a step is whether to stop, and goes through shard 0; to save is rank 0's alone."""
        self._num_questions += 1
        if self._num_questions > 1:
            return wish
        if wish and not self._links[0].is_stopped:
            self._links[0].ask(Tag.STOP, self._run)
        return self._links[0].is_stopped

    def dismiss(self) -> None:
        self._links[0].ask(Tag.STOP, self._run)

    def sum(self, tensor: Tensor) -> Tensor:
        if not self._has_ended:
            self._has_ended = True
            for link in self._links:
                link.ask(Tag.END, self._run)
        self._num_sums += 1
        return self._links[0].add(self._run, self._num_sums, tensor)

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def collect(self, state: OptimizerState) -> OptimizerState:
        """The state that the servers keep; a rank that updates by itself has its own."""
        if self._settings.form == "difference" or self.rank != 0:
            return state
        found: dict[str, dict[str, list[tuple[Piece, Tensor]]]] = {name: {} for name in state.slots}
        for link in self._links:
            link.ask(Tag.FETCH, self._run)
        for link in self._links:
            message = link.await_state()
            shared = Shared(*(torch.tensor(float(message.header[k]), dtype=torch.float64) for k in ("lr", "updates")))
            for (index, slot), tensor in zip(message.header["slots"], message.tensors, strict=True):
                piece = link.pieces[index]
                found[piece.name].setdefault(slot, []).append((piece, tensor))
        slots = {
            name: {slot: put_together(parts, self._parameters[name]) for slot, parts in own.items()}
            for name, own in found.items()
        }
        return OptimizerState(shared, slots)

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        """Rank 0 judges the weights that it was last sent; when all have ended, every rank takes the last there are."""
        values: dict[str, float] = {}
        series: dict[str, tuple[float, ...]] = {}
        if self._has_ended:
            summary = self._take_last_weights()
            values = {"staleness": summary.mean_staleness, "dropped_gradients": float(summary.dropped)}
            series = {"staleness": tuple(map(float, summary.staleness))}
        yield Consensus(SoloReplicas() if self.rank == 0 else None, values, series)

    def _take_last_weights(self) -> Summary:
        for link in self._links:
            link.ask(Tag.PULL, self._run)
        first, *_ = [link.await_weights() for link in self._links]
        ages = {int(age): int(count) for age, count in first.header["staleness"]}
        staleness = tuple(ages.get(age, 0) for age in range(max(ages, default=-1) + 1))
        return Summary(staleness=staleness, dropped=int(first.header["dropped"]))

    def memory(self) -> Mapping[str, Entry]:
        return {}
