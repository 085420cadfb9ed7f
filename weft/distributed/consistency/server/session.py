"""A worker's side of all shards: how it begins, whom it asks, what it hears, and how it ends."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import Piece, write
from weft.distributed.consistency.server.decisions import Summary
from weft.distributed.consistency.server.link import ShardLink
from weft.distributed.consistency.server.protocol import InitHeader, Tag, describe
from weft.distributed.consistency.server.settings import Settings
from weft.distributed.mailbox import AbstractMailbox, Message
from weft.distributed.placement.cut import cut_evenly, put_together
from weft.distributed.placement.inside import InsideReplica
from weft.errors import PeerLostError
from weft.graph import State
from weft.training.optimizers import OptimizerState, Shared, slots_beside

__all__ = ["Session"]


@final
class Session:
    """Rank 0 begins; all greet every shard and are sent the weights it holds.

    `places` is where weights that come are written: the parameters, or, where ranks have weights of their own and the
    shards hold a centre, a copy of the centre.

    Ranks that hold a model together each have a session with the servers of their own part; the first of them says
    which step all take next.

    Args:
        seeds: of the trainings to come, in order; what servers record is filed under them.
        inside: the ranks that hold the model together, this one among them; None for this one alone.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        settings: Settings,
        seeds: Sequence[int],
        inside: InsideReplica | None = None,
    ) -> None:
        self.mailbox = mailbox
        self._inside = inside
        self._agreed: tuple[int, bool] | None = None  # the step, and whether to stop
        self._settings = settings
        self.codec = settings.make_codec(mailbox.address)
        """Of what this rank pushes, with what it has not sent yet."""
        self._weights_codec = settings.make_weights_codec()
        self._seeds = iter(seeds)
        self._seed = 0
        self.run = -1
        self._untrained: list[Tensor] = []  # what the shards do not update, and all begin with as rank 0 does
        self.parameters: Mapping[str, Tensor] = {}
        """Those that this rank tells the servers of: what others of its replica hold too is said by one of them."""
        self._trained: Mapping[str, Tensor] = {}
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
        if self._inside is not None:
            self._inside.join(model.parameters)
        trained = {name: p.detach() for name, p in model.parameters.items() if p.requires_grad}
        self._trained = trained
        self.parameters = {name: p for name, p in trained.items() if not self._inside or self._inside.speaks_for(name)}
        frozen = [p.detach() for p in model.parameters.values() if not p.requires_grad]
        self._untrained = [*frozen, *(buffer.detach() for buffer in model.buffers.values())]
        has_centre = self._settings.form == "weights"
        self.places = {n: torch.empty_like(p) for n, p in self.parameters.items()} if has_centre else self.parameters
        cuts = cut_evenly(self.parameters, self._settings.num_shards, may_cut=self._settings.may_cut)
        addresses = self._settings.shards
        shards = zip(addresses, cuts, strict=True)
        self.codec.remember({})
        self.links = [self._link(address, pieces) for address, pieces in shards]
        self._host = self._link_to_host() if self._settings.inner > 1 else None
        self.mailbox.await_peers(addresses if self._host is None else [*addresses, self._host.address])
        self._begin({}, 0, None)

    def _link(self, address: int, pieces: Sequence[Piece]) -> ShardLink:
        return ShardLink(self.mailbox, address, pieces, self.places, self.codec, self._weights_codec)

    def _link_to_host(self) -> ShardLink:
        """The host server takes the pieces of all shards at once."""
        address = self._settings.host_of(self.mailbox.address)
        pieces = [piece for link in self.links for piece in link.pieces]
        link = self._link(address, pieces)
        link.about = {"seed": self._seed, "counts": [len(link.pieces) for link in self.links]}
        if not self.codec.is_exact:
            link.about |= {"layout": describe(link.buckets)}
        return link

    def begin_again(self, step: int, slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Go on after `step` global batches, with rank 0's weights as they are now, and this optimizer state."""
        self.sum(torch.zeros(1))  # all have been let go once, and nobody begins before all have
        self._begin(slots, updates, self._settings.first_after(step))

    def _begin(self, slots: Mapping[str, Mapping[str, Tensor]], updates: int, step: int | None) -> None:
        self.run, self.has_ended, self._wishes_stop, self._num_sums = self.run + 1, False, False, 0
        self._agreed = None
        write(self.places, self.parameters)
        begins = self.mailbox.address == 0
        for link in self.links if begins else ():
            self._initialise(link, slots, updates)

        def begin_again(link: ShardLink) -> None:
            if begins:
                self._initialise(link, slots, updates)
            link.greet(self.run, step)

        # Shard 0 first: where all are about to end it takes nobody back, and no other shard may wait for this rank.
        (welcome,) = self.greet(self.links[:1], step, begin_again)
        for tensor, given in zip(self._untrained, welcome.tensors[len(self.links[0].places) :], strict=True):
            tensor.copy_(given)
        # A shard that is behind must not wait for a round that shard 0 has closed without this rank.
        self.greet(self.links[1:], step if self._settings.deals_work else self.step, begin_again)
        write(self.parameters, self.places)
        self.hand_round()
        self.agree()

    def _initialise(self, link: ShardLink, slots: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Send a shard what rank 0 begins with."""
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
        link.tell(Tag.INIT, vars(header), [*link.places, *(tensor for _, _, tensor in own), *buffers])

    # Questions and answers.

    def greet(
        self, links: Sequence[ShardLink], step: int | None, greet_restored: Callable[[ShardLink], None] | None = None
    ) -> list[Message]:
        """Ask for weights, and take them up."""
        welcomes = self._ask(links, lambda link: link.greet(self.run, step), greet_restored)
        self.run = int(welcomes[0].header["run"]) if welcomes else self.run
        return welcomes

    def _ask(
        self,
        links: Sequence[ShardLink],
        ask: Callable[[ShardLink], object],
        ask_restored: Callable[[ShardLink], object] | None = None,
    ) -> list[Message]:
        """The answers of all. If a shard is lost, the one that is restored in its place is asked again."""
        for link in links:
            ask(link)
        answers: list[Message] = []
        while len(answers) < len(links):
            link = links[len(answers)]
            try:
                answers.append(link.await_answer())
            except PeerLostError:
                self._await_return(link)
                (ask_restored or ask)(link)
        return answers

    def _await_return(self, link: ShardLink) -> None:
        link.await_return(is_restored=not self._settings.is_synchronous)
        if self._wishes_stop and link is self.links[0]:  # the one before it may have had no time to hear it
            link.tell(Tag.STOP, {"run": self.run})

    # Steps.

    @property
    def carriers(self) -> Sequence[ShardLink]:
        """Where gradients go: to the shards, or to the host server in front of them."""
        return self.links if self._host is None else [self._host]

    @property
    def step(self) -> int:
        """Shard 0 gives out the work; of a replica of several ranks, that of the first."""
        return self.links[0].step if self._agreed is None else self._agreed[0]

    def agree(self) -> None:
        """Ranks that hold a model together go on at the step that the first of them was told: the servers of each part
        decide for themselves. All of them call it when they have been let go."""
        if self._inside is None:
            return
        said = torch.tensor([self.links[0].step, int(self.links[0].is_stopped)])
        self._inside.group.broadcast(said)
        step, is_stopped = said.tolist()
        self._agreed = step, bool(is_stopped)

    def hand_round(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Weights that came, or these, to the ranks of the replica that hold them as well."""
        if self._inside is not None:
            self._inside.hand_round(self._trained if tensors is None else tensors)

    def take_answer(self, link: ShardLink, step: int) -> Message | None:
        """Wait for an answer; of a server that is lost, for the one in its place, whose welcome has its weights."""
        try:
            message = link.await_answer()
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
        return self.links[0].is_stopped if self._agreed is None else self._agreed[1]

    def stop(self) -> None:
        """Have all ranks stop."""
        self._wishes_stop = True
        self.links[0].tell(Tag.STOP, {"run": self.run})

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all workers that are left. Whoever asks takes no more steps, unless ranks are synchronous."""
        if not self.has_ended and not self._settings.is_synchronous:
            self.has_ended = True
            for link in self.links:
                link.tell(Tag.END, {"run": self.run})
        return self._add(tensor, gather=False)[0]

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Of all workers that are left, in their order."""
        return self._add(tensor, gather=True)

    def _add(self, tensor: Tensor, *, gather: bool) -> tuple[Tensor, ...]:
        self._num_sums += 1
        header = {"run": self.run, "number": self._num_sums, "gather": gather}
        (answer,) = self._ask(self.links[:1], lambda link: link.ask(Tag.SUM, Tag.TOTAL, header, [tensor]))
        return tuple(found.to(tensor.device) for found in answer.tensors)

    def fetch_state(self, state: OptimizerState) -> OptimizerState:
        """The optimizer state that the servers keep, in place of this rank's, on the device of the parameters; of what
        another of its replica speaks for, none."""
        others = self._trained.keys() - self.parameters.keys()
        found: dict[str, dict[str, list[tuple[Piece, Tensor]]]] = {n: {} for n in state.slots if n not in others}
        answers = self._ask(self.links, lambda link: link.ask(Tag.FETCH, Tag.STATE, {"run": self.run}))
        for link, message in zip(self.links, answers, strict=True):
            shared = Shared(*(torch.tensor(float(message.header[k]), dtype=torch.float64) for k in ("lr", "updates")))
            for (index, slot), tensor in zip(message.header["slots"], message.tensors, strict=True):
                piece = link.pieces[index]
                found[piece.name].setdefault(slot, []).append((piece, tensor))
        slots = {
            name: slots_beside(
                self.parameters[name],
                {slot: put_together(parts, self.parameters[name]) for slot, parts in own.items()},
            )
            for name, own in found.items()
        }
        return OptimizerState(shared, slots)

    @property
    def has_exact_weights(self) -> bool:
        """Whether ranks are sent weights as the shards hold them."""
        return self._weights_codec.is_exact

    def fetch_weights(self) -> dict[str, Tensor]:
        """Those that the shards hold now, as they are; this rank keeps its own."""
        found = {name: torch.empty_like(parameter) for name, parameter in self._trained.items()}
        self._ask(self.links, lambda link: link.pull(self.run, [piece.of(found[piece.name]) for piece in link.pieces]))
        self.hand_round(found)
        return found

    def centre(self) -> Mapping[str, Tensor]:
        """This rank's copy of the centre that the shards hold; nothing where they hold the ranks' own weights."""
        if self.places is self.parameters:
            return {}
        found = {n: self.places[n] if n in self.places else torch.empty_like(p) for n, p in self._trained.items()}
        self.hand_round(found)
        return found

    def take_last_weights(self) -> Summary:
        """Those that the shards hold now, and what shard 0 knows of the whole training; of losses, what all know."""
        answers = self._ask(self.links, lambda link: link.pull(self.run, link.places))
        first = answers[0]
        ages = {int(age): int(count) for age, count in first.header["staleness"]}
        staleness = tuple(ages.get(age, 0) for age in range(max(ages, default=-1) + 1))
        return Summary(
            staleness=staleness,
            dropped=int(first.header["dropped"]),
            lost=sum(int(answer.header["lost"]) for answer in answers),
            returned=int(first.header["returned"]),
        )
