"""A worker's side of all shards: how it begins, whom it asks, what it hears, and how it ends."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor

from weft.distributed.consistency.parcel import write
from weft.distributed.consistency.server.cut import Piece, cut_evenly, put_together
from weft.distributed.consistency.server.link import ShardLink
from weft.distributed.consistency.server.protocol import InitHeader, Tag
from weft.distributed.consistency.server.record import Summary
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.errors import PeerLostError
from weft.graph import State
from weft.training.optimizers import OptimizerState, Shared

__all__ = ["Session"]

Answer = TypeVar("Answer")


@final
class Session:
    """Rank 0 begins; all greet every shard and are sent the weights it holds.

    `places` is where weights that come are written: the parameters, or, where ranks have weights of their own and the
    shards hold a centre, a copy of the centre.

    Args:
        seeds: of the trainings to come, in order; what servers record is filed under them.
    """

    def __init__(self, mailbox: AbstractMailbox, settings: Settings, seeds: Sequence[int]) -> None:
        self.mailbox = mailbox
        self._settings = settings
        self._seeds = iter(seeds)
        self._seed = 0
        self.run = -1
        self._untrained: list[Tensor] = []  # what the shards do not update, and all begin with as rank 0 does
        self.parameters: Mapping[str, Tensor] = {}
        self.places: Mapping[str, Tensor] = {}
        self.links: list[ShardLink] = []
        self._host: ShardLink | None = None
        self.has_ended = False
        self._wishes_stop = False
        self._num_sums = 0

    # Beginning.

    def join(self, model: State) -> None:
        if self.links:
            self.sum(torch.zeros(1))  # nobody begins anew before all have ended
        self._seed = next(self._seeds)
        self.parameters = {name: p.detach() for name, p in model.parameters.items() if p.requires_grad}
        frozen = [p.detach() for p in model.parameters.values() if not p.requires_grad]
        self._untrained = [*frozen, *(buffer.detach() for buffer in model.buffers.values())]
        has_centre = self._settings.form == "elastic"
        self.places = {n: torch.empty_like(p) for n, p in self.parameters.items()} if has_centre else self.parameters
        cuts = cut_evenly(self.parameters, self._settings.num_shards, may_cut=self._settings.may_cut)
        addresses = self._settings.shards
        shards = zip(addresses, cuts, strict=True)
        self.links = [ShardLink(self.mailbox, address, pieces, self.places) for address, pieces in shards]
        self._host = self._link_to_host() if self._settings.inner > 1 else None
        self.mailbox.await_peers(addresses if self._host is None else [*addresses, self._host.address])
        self._begin({}, 0, None)

    def _link_to_host(self) -> ShardLink:
        """The host server takes the pieces of all shards at once."""
        address = self._settings.host_of(self.mailbox.address)
        link = ShardLink(self.mailbox, address, [p for link in self.links for p in link.pieces], self.places)
        link.about = {"seed": self._seed, "counts": [len(link.pieces) for link in self.links]}
        return link

    def begin_again(self, step: int, slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Go on after `step` global batches, with rank 0's weights as they are now, and this optimizer state."""
        self.sum(torch.zeros(1))  # all have been let go once, and nobody begins before all have
        self._begin(slots, updates, self._settings.first_after(step))

    def _begin(self, slots: Mapping[str, Mapping[str, Tensor]], updates: int, step: int | None) -> None:
        self.run, self.has_ended, self._wishes_stop, self._num_sums = self.run + 1, False, False, 0
        write(self.places, self.parameters)
        self._initialise(self.links, slots, updates)

        def begin_again(link: ShardLink) -> None:
            self._initialise([link], slots, updates)
            link.say_hello(self.run, step)

        # Shard 0 first: where all are about to end it takes nobody back, and no other shard may wait for this rank.
        (buffers,) = self._meet(self.links[:1], step, begin_again)
        for buffer, tensor in zip(self._untrained, buffers, strict=True):
            buffer.copy_(tensor)
        # A shard that is behind must not wait for a round that shard 0 has closed without this rank.
        self._meet(self.links[1:], step if self._settings.deals_work else self.step, begin_again)
        write(self.parameters, self.places)

    def _initialise(self, links: Sequence[ShardLink], slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """What rank 0 begins with goes to the shards."""
        for link in links if self.mailbox.address == 0 else ():
            self._initialise_shard(link, slots, updates)

    def _initialise_shard(self, link: ShardLink, slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        total = sum(parameter.numel() for parameter in self.parameters.values())
        own = [
            (i, slot, piece.of(tensor) if tensor.shape == self.parameters[piece.name].shape else tensor)
            for i, piece in enumerate(link.pieces)
            for slot, tensor in slots.get(piece.name, {}).items()
        ]
        buffers = self._untrained if link is self.links[0] else []
        order = list(self.parameters) if self._settings.clips_together else []
        header = InitHeader(
            run=self.run,
            seed=self._seed,
            fraction=sum(piece.end - piece.begin for piece in link.pieces) / max(1, total),
            num_pieces=len(link.pieces),
            num_buffers=len(buffers),
            slots=tuple((index, slot) for index, slot, _ in own),
            updates=updates,
            clip_norm=None if self._settings.clips_own else self._settings.clip_norm,
            positions=tuple(order.index(piece.name) for piece in link.pieces) if order else (),
        )
        link.initialise(header, [*(tensor for _, _, tensor in own), *buffers])

    def greet(self, links: Sequence[ShardLink], step: int | None) -> None:
        """Ask for weights, and wait for them."""
        self._meet(links, step, lambda link: link.say_hello(self.run, step))

    def _meet(
        self, links: Sequence[ShardLink], step: int | None, greet_restored: Callable[[ShardLink], None]
    ) -> list[tuple[Tensor, ...]]:
        """Greet shards, and take up their weights; of each the buffers that rank 0 began with, which shard 0 has."""
        for link in links:
            link.say_hello(self.run, step)
        welcomes = []
        for link in links:
            self.run, buffers = self._hear(link, link.await_welcome, partial(greet_restored, link))
            welcomes.append(buffers)
        return welcomes

    def _hear(self, link: ShardLink, await_answer: Callable[[], Answer], ask_again: Callable[[], None]) -> Answer:
        """What a shard answers. If it is lost, the one that is restored in its place is asked again."""
        while True:
            try:
                return await_answer()
            except PeerLostError:
                self._await_return(link)
                ask_again()

    def _await_return(self, link: ShardLink) -> None:
        link.await_return()
        if self._wishes_stop and link is self.links[0]:  # the one before it may have had no time to hear it
            link.tell(Tag.STOP, self.run)

    # Steps.

    @property
    def carriers(self) -> Sequence[ShardLink]:
        """Where gradients go: to the shards, or to the host server in front of them."""
        return self.links if self._host is None else [self._host]

    @property
    def step(self) -> int:
        """Shard 0 gives out the work."""
        return self.links[0].step

    def take_answer(self, link: ShardLink, step: int) -> Message | None:
        """Wait for an answer; of a server that is lost, for the one in its place, whose welcome has its weights."""
        try:
            message = link.await_weights()
        except PeerLostError:
            self._await_return(link)
            self.greet([link] if link in self.links else self.links, step)
            return None
        if link is self._host:
            self.links[0].step, self.links[0].is_stopped = link.step, link.is_stopped
        return message

    # Decisions, and the end.

    @property
    def is_stopped(self) -> bool:
        return self.links[0].is_stopped

    def stop(self) -> None:
        """Have all ranks stop."""
        self._wishes_stop = True
        self.links[0].tell(Tag.STOP, self.run)

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all workers that are left. Whoever asks takes no more steps, unless ranks are synchronous."""
        if not self.has_ended and not self._settings.is_synchronous:
            self.has_ended = True
            for link in self.links:
                link.tell(Tag.END, self.run)
        return self._add(tensor, gather=False)[0]

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Of all workers that are left, in their order."""
        return self._add(tensor, gather=True)

    def _add(self, tensor: Tensor, *, gather: bool) -> tuple[Tensor, ...]:
        self._num_sums += 1
        first = self.links[0]
        give = partial(first.add, self.run, self._num_sums, tensor, gather=gather)
        give()
        return self._hear(first, first.await_answer, give).tensors

    def fetch_state(self, state: OptimizerState) -> OptimizerState:
        """The optimizer state that the servers keep, in place of this rank's."""
        found: dict[str, dict[str, list[tuple[Piece, Tensor]]]] = {name: {} for name in state.slots}
        for link in self.links:
            link.fetch(self.run)
        for link in self.links:
            message = self._hear(link, link.await_answer, partial(link.fetch, self.run))
            shared = Shared(*(torch.tensor(float(message.header[k]), dtype=torch.float64) for k in ("lr", "updates")))
            for (index, slot), tensor in zip(message.header["slots"], message.tensors, strict=True):
                piece = link.pieces[index]
                found[piece.name].setdefault(slot, []).append((piece, tensor))
        slots = {
            name: {slot: put_together(parts, self.parameters[name]) for slot, parts in own.items()}
            for name, own in found.items()
        }
        return OptimizerState(shared, slots)

    def take_last_weights(self) -> Summary:
        """Those that the shards hold now, and what shard 0 knows of the whole training; of losses, what all know."""
        for link in self.links:
            link.pull(self.run)
        answers = [self._hear(link, link.await_weights, partial(link.pull, self.run)) for link in self.links]
        first = answers[0]
        ages = {int(age): int(count) for age, count in first.header["staleness"]}
        staleness = tuple(ages.get(age, 0) for age in range(max(ages, default=-1) + 1))
        return Summary(
            staleness=staleness,
            dropped=int(first.header["dropped"]),
            lost=sum(int(answer.header["lost"]) for answer in answers),
            returned=int(first.header["returned"]),
        )
