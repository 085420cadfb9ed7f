"""A worker that gossips over the mailbox: it computes, meets neighbours, and evaluates if it is rank 0.

worker   | gradient ............... | step |  gradient ............... | step |     meets others around its gradient
desk     answers for it meanwhile, and never waits                                  (meeting.py, desk.py)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.graphs import make_mixing
from weft.distributed.consistency.pairs.events import Deal, Mean
from weft.distributed.consistency.pairs.journal import Journal, Script, journal_file
from weft.distributed.consistency.pairs.meeting import AbstractMeeting, MixMeeting, PairMeeting
from weft.distributed.consistency.pairs.post import Post
from weft.distributed.consistency.pairs.protocol import Tag, desk_address
from weft.distributed.consistency.pairs.slot import Slot, Weights
from weft.distributed.mailbox import AbstractMailbox
from weft.errors import PeerLostError
from weft.graph import GradientSink, State
from weft.planning.gossip_graphs import make_split
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.gradients import use_point
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Consensus, SoloReplicas, Traffic, Update
from weft.training.sampling import share

__all__ = ["GossipReplicas", "GossipSettings"]


@dataclass(frozen=True)
class GossipSettings:
    """What the ranks of one plan have in common.

    Args:
        in_pairs: meet one neighbour in a turn (AD-PSGD), and take work as it is dealt; else all (D-PSGD), on one's own
            share of every batch.
        run: the run folder, where each rank records what happens to it.
        scripts: by seed, what every rank is to do again; None to train anew.
        patience: seconds to wait for an answer.
    """

    graph: str
    size: int
    in_pairs: bool = True
    plan: str = ""
    run: Path | None = None
    scripts: Mapping[int, Sequence[Script]] | None = None
    patience: float = 3600.0

    def make_meeting(self, post: Post) -> AbstractMeeting:
        if self.in_pairs:
            return PairMeeting(post, make_split(self.graph, self.size))
        return MixMeeting(post, make_mixing(self.graph, self.size).graph)


@final
class GossipReplicas(AbstractReplicas):
    """One of the workers. Rank 0 begins, evaluates and keeps the record.

    Ranks do not meet: `gather` gives a rank's own tensor alone, so that rank 0 can write a checkpoint by itself. `sum`
    is for those who have ended their loop, and waits for all that are left.

    Args:
        slot: this rank's weights, shared with its desk.
        seeds: of the trainings to come, in order.
        on_joined: called when all ranks know this one.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        slot: Slot,
        settings: GossipSettings,
        seeds: Sequence[int],
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        self._post = Post(mailbox, settings.size, settings.patience)
        self._meeting = settings.make_meeting(self._post)
        self._slot = slot
        self._settings = settings
        self._seeds = iter(seeds)
        self._on_joined = on_joined
        self._seed = 0
        self._script: Script | None = None
        self._deals: Iterator[Deal] = iter(())
        self._parameters: dict[str, Tensor] = {}
        self._weights: Weights | None = None
        self._gradients: dict[str, Tensor | None] = {}
        self._weight = 0.0
        self._turn = self._work = 0
        self._is_stopped = self._has_ended = False
        self._num_sums = self._num_looks = 0
        self._began = 0.0
        self._num_bytes = 0
        self._traffic = Traffic()

    @property
    def mesh(self) -> Mesh:
        return Mesh(self._slot.rank, data=self._settings.size)

    @property
    def is_synchronous(self) -> bool:
        return False

    # Beginning.

    def join(self, model: State) -> None:
        if self._post.run < 0:
            self._post.mailbox.await_peers(range(2 * self._size), self._post.deadline)
            self._on_joined()
        else:
            self.sum(torch.zeros(1))  # nobody begins anew before all have ended
        self._seed = next(self._seeds)
        self._parameters = {name: p.detach() for name, p in model.parameters.items() if p.requires_grad}
        self._start([*self._parameters.values(), *(buffer.detach() for buffer in model.buffers.values())], 0)

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        """All begin again, from the weights of rank 0 that a checkpoint gave it."""
        self.sum(torch.zeros(1))
        self._start(list(self._parameters.values()), step * self._size)

    def _start(self, tensors: Sequence[Tensor], first: int) -> None:
        """Rank 0's tensors on every rank, and work for each."""
        self._post.run += 1
        self._turn = self._num_sums = self._num_looks = 0
        self._is_stopped = self._has_ended = False
        if self._rank == 0:
            self._post.note(0, Tag.BEGIN, first=first)
            for other in self._post.alive():
                if other:
                    self._post.send(other, Tag.START, tensors)
            self._post.settle()
        else:
            for tensor, given in zip(tensors, self._post.receive(Tag.START, 0).tensors, strict=True):
                tensor.copy_(given)
        self._weights = Weights(self._parameters, self._post.mailbox.empty)
        scripts = self._settings.scripts
        self._script = scripts[self._seed][self._rank] if scripts is not None else None
        self._deals = iter(self._script.deals if self._script else ())
        self._slot.begin(
            self._post.run, self._weights, self._open_journal(first), self._script.events if self._script else ()
        )
        self._meeting.begin(self._seed, self._weights, self._script)
        self._post.note(self._rank, Tag.FREE)
        self._ask_for_work(0)
        self._take_work()

    def _open_journal(self, first: int) -> Journal | None:
        if self._settings.run is None:
            return None
        about = {"plan": self._settings.plan, "rank": self._rank, "seed": self._seed, "first": first}
        return Journal(journal_file(self._settings.run, self._seed, self._rank), about)

    # Work: piece i is share i mod N of batch i div N, for whoever asks.

    def _ask_for_work(self, turn: int) -> None:
        if self._script is None:
            self._post.note(0, Tag.DEAL, turn=turn)

    def _take_work(self) -> None:
        """What was asked for a turn ago; in a replay what was dealt then, up to where this rank died."""
        if self._script is not None:
            deal = next(self._deals, None) or Deal(self._work, stop=True)
        else:
            header = self._post.receive(Tag.WORK, desk_address(self._size, 0), turn=self._turn).header
            deal = Deal(int(header["work"]), bool(header["stop"]))
        self._slot.note(deal)
        self._work, self._is_stopped = deal.work, deal.stop

    def next_step(self, step: int) -> int:
        return self._work // self._size

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self._work % self._size, self._size)

    # A turn.

    def begin(self, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self._began = self._now
        self._num_bytes = self._meeting.set_out(self._turn)
        self._ask_for_work(self._turn + 1)
        return self._gradients.__setitem__

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        own, state = loss / self._weight if self._weight else 0.0, update.state
        if not math.isfinite(own):
            return own, state
        if self._script is not None and not self._script.has_completed(self._turn):  # here it died
            self._is_stopped = True
            return own, state
        waited = self._now
        weights, step = self._meeting.take(self._turn)
        self._post.settle()
        while not self._slot.begin_step(step):
            self._post.receive(Tag.GO, desk_address(self._size, self._rank))
        arrived = self._now
        self._own.unpack(self._parameters, weights)
        state = update.apply(self._gradients)
        if self._slot.end_step(self._parameters, step):
            self._post.note(self._rank, Tag.FREE)
        updated = self._now
        self._turn += 1
        self._take_work()
        hidden = waited - self._began if self._num_bytes else 0.0
        num_bytes = self._num_bytes + self._slot.take_answered_bytes()
        self._traffic = Traffic(arrived - waited + self._now - updated, hidden, num_bytes)
        return own, state

    def traffic(self) -> Traffic:
        return self._traffic

    # Decisions, and the end.

    def agree_to_save(self, wish: bool) -> bool:
        """It is rank 0's alone."""
        return wish

    def agree_to_stop(self, wish: bool) -> bool:
        """The answer comes with the work."""
        if wish and not self._is_stopped:
            self._post.note(0, Tag.STOP)
        return self._is_stopped

    def dismiss(self) -> None:
        """All are to stop, and this rank does at once: it does not take the turn that was dealt to it."""
        self._post.note(0, Tag.STOP)
        self._meeting.leave(self._turn)

    def sum(self, tensor: Tensor) -> Tensor:
        self._has_ended = True
        self._num_sums += 1
        keeper = desk_address(self._size, 0)
        self._post.send(keeper, Tag.SUM, [tensor], number=self._num_sums)
        self._post.settle()
        return self._post.receive(Tag.TOTAL, keeper, number=self._num_sums).tensors[0]

    def depart(self) -> None:
        """Nobody leaves before all have ended: they may still ask this rank, or be asked by it."""
        if self._post.run >= 0:
            self.sum(torch.zeros(1))

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def collect(self, state: OptimizerState) -> OptimizerState:
        return state

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        """Rank 0 judges the mean of the weights of all ranks that are left, with its own running statistics; between
        evaluations the others go on."""
        if self._rank != 0:
            yield Consensus(None)
            return
        copies = self._look()
        # Added one by one in the order of ranks: torch.mean would choose an order by the sizes.
        mean = [sum(flats[1:], flats[0]) / len(flats) for flats in zip(*copies.values(), strict=True)]
        squares = [
            (flat.double() - m).square().sum() for own in copies.values() for flat, m in zip(own, mean, strict=True)
        ]
        values = {"consensus_distance": math.sqrt(float(torch.stack(squares).sum()) / len(copies))}
        if self._has_ended:
            values["lost_ranks"] = float(self._size - len(copies))
        with use_point(model.parameters, {**model.parameters, **self._own.views_of(mean)}):
            yield Consensus(SoloReplicas(), values)

    def _look(self) -> dict[int, Sequence[Tensor]]:
        """Copies of the weights of all that are left, in the order of ranks."""
        number, self._num_looks = self._num_looks, self._num_looks + 1
        wanted = self._script.means.get(number, ()) if self._script is not None else self._post.alive()
        for rank in wanted:
            self._post.note(rank, Tag.LOOK, number=number)
        copies: dict[int, Sequence[Tensor]] = {}
        for rank in wanted:
            with suppress(PeerLostError):
                copies[rank] = self._post.receive(Tag.VIEW, desk_address(self._size, rank), number=number).tensors
        self._slot.note(Mean(number, tuple(copies)))
        return copies

    def memory(self) -> Mapping[str, Entry]:
        return {}

    @property
    def _rank(self) -> int:
        return self._slot.rank

    @property
    def _size(self) -> int:
        return self._settings.size

    @property
    def _own(self) -> Weights:
        assert self._weights is not None, "join() comes first"
        return self._weights

    @property
    def _now(self) -> float:
        return self._post.mailbox.clock.now()
