"""A worker that gossips over the mailbox: it computes, averages with neighbours, and evaluates if it is rank 0.

worker      | gradient ............... | step |  gradient ............... | step |  averages around its gradient
responder   answers for it meanwhile, and never waits                               (averaging.py, responder.py)
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.control import Journal
from weft.distributed.consistency.graphs import make_mixing
from weft.distributed.consistency.pairs.averaging import AbstractAveraging, NeighbourAveraging, PairAveraging
from weft.distributed.consistency.pairs.events import Deal, Mean, ReplayPlan, rank_journal
from weft.distributed.consistency.pairs.protocol import RunMailbox, Tag, responder_address
from weft.distributed.consistency.pairs.weights import SharedWeights
from weft.distributed.consistency.parcel import FlatTensors, write
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
    """The settings that all ranks of one plan share.

    Args:
        in_pairs: meet one neighbour in a turn (AD-PSGD), and take work as it is dealt; else all (D-PSGD), on one's own
            share of every batch.
        run: the run folder, where each rank records what happens to it.
        replay: by seed, what every rank is to do again; None to train anew.
        patience: seconds to wait for an answer.
    """

    graph: str
    size: int
    in_pairs: bool = True
    plan: str = ""
    run: Path | None = None
    replay: Mapping[int, Sequence[ReplayPlan]] | None = None
    patience: float = 3600.0

    def make_averaging(
        self, mailbox: RunMailbox, weights: FlatTensors, replay: ReplayPlan | None, seed: int
    ) -> AbstractAveraging:
        if self.in_pairs:
            return PairAveraging(mailbox, weights, replay, split=make_split(self.graph, self.size), seed=seed)
        return NeighbourAveraging(mailbox, weights, replay, graph=make_mixing(self.graph, self.size).graph)


@final
class WorkFeed:
    """This rank's work: asked of the responder of rank 0 a turn ahead; in a replay what was dealt then, up to where the
    rank died. Piece i is share i mod N of batch i div N."""

    def __init__(self, mailbox: RunMailbox, shared: SharedWeights, replay: ReplayPlan | None) -> None:
        self._mailbox = mailbox
        self._shared = shared
        self._replayed = None if replay is None else iter(replay.deals)
        self.piece = 0
        self.is_stopped = False
        self.ask(0)
        self.take(0)

    def ask(self, turn: int) -> None:
        if self._replayed is None:
            self._mailbox.note(0, Tag.DEAL, turn=turn)

    def take(self, turn: int) -> None:
        """Take the work that was asked for a turn ago."""
        if self._replayed is not None:
            deal = next(self._replayed, None) or Deal(self.piece, stop=True)
        else:
            header = self._mailbox.receive_answer(Tag.WORK, 0, turn=turn).header
            deal = Deal(int(header["work"]), bool(header["stop"]))
        self._shared.note(deal)
        self.piece, self.is_stopped = deal.work, deal.stop


@dataclass
class GossipRun:
    """One training of a rank."""

    weights: FlatTensors
    averaging: AbstractAveraging
    work: WorkFeed
    replay: ReplayPlan | None
    turn: int = 0
    num_looks: int = 0  # evaluations


@final
class GossipReplicas(AbstractReplicas):
    """One of the workers. Rank 0 begins, evaluates and keeps the record.

    Ranks do not meet: `gather` gives a rank's own tensor alone, so that rank 0 can write a checkpoint by itself. `sum`
    is for those who have ended their loop, and waits for all that are left.

    Args:
        shared: this rank's weights, shared with its responder.
        seeds: of the trainings to come, in order.
        on_joined: called when all ranks know this one.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        shared: SharedWeights,
        settings: GossipSettings,
        seeds: Sequence[int],
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        self._mailbox = RunMailbox(mailbox, settings.size, settings.patience)
        self._shared = shared
        self._settings = settings
        self._seeds = iter(seeds)
        self._on_joined = on_joined
        self._seed = 0
        self._parameters: dict[str, Tensor] = {}
        self._current: GossipRun | None = None
        self._gradients: dict[str, Tensor | None] = {}
        self._weight = 0.0
        self._has_ended = False
        self._num_sums = 0
        self._began = 0.0
        self._num_bytes = 0
        self._traffic = Traffic()

    @property
    def mesh(self) -> Mesh:
        return Mesh(self._shared.rank, data=self._settings.size)

    @property
    def is_synchronous(self) -> bool:
        return False

    # Beginning.

    def join(self, model: State) -> None:
        if self._mailbox.run < 0:
            self._mailbox.mailbox.await_peers(range(2 * self._size), self._mailbox.deadline)
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
        self._mailbox.run += 1
        self._num_sums, self._has_ended = 0, False
        if self._rank == 0:
            self._mailbox.note(0, Tag.BEGIN, first=first)
            for other in self._mailbox.alive():
                if other:
                    self._mailbox.send(other, Tag.START, tensors)
            self._mailbox.settle()
        else:
            for tensor, given in zip(tensors, self._mailbox.receive(Tag.START, 0).tensors, strict=True):
                tensor.copy_(given)
        weights, plans = FlatTensors(self._parameters, self._mailbox.mailbox.empty), self._settings.replay
        replay = plans[self._seed][self._rank] if plans is not None else None
        self._shared.begin(self._mailbox.run, weights, self._open_journal(first), replay.events if replay else ())
        averaging = self._settings.make_averaging(self._mailbox, weights, replay, self._seed)
        self._mailbox.note(self._rank, Tag.FREE)
        self._current = GossipRun(weights, averaging, WorkFeed(self._mailbox, self._shared, replay), replay)

    def _open_journal(self, first: int) -> Journal:
        run = self._settings.run
        about = {"plan": self._settings.plan, "rank": self._rank, "seed": self._seed, "first": first}
        return Journal(run and rank_journal(run, self._seed, self._rank), about)

    # A turn.

    def next_step(self, step: int) -> int:
        return self._run.work.piece // self._size

    def share(self, indices: Tensor) -> Tensor:
        return share(indices, self._run.work.piece % self._size, self._size)

    def begin(self, weight: float) -> GradientSink:
        self._gradients, self._weight = {}, weight
        self._began = self._now
        self._num_bytes = self._run.averaging.set_out(self._run.turn)
        self._run.work.ask(self._run.turn + 1)
        return self._gradients.__setitem__

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        run, own, state = self._run, loss / self._weight if self._weight else 0.0, update.state
        if not math.isfinite(own):
            return own, state
        if run.replay is not None and not run.replay.has_completed(run.turn):  # here it died
            run.work.is_stopped = True
            return own, state
        waited = self._now
        weights, step = run.averaging.take(run.turn)
        self._mailbox.settle()
        while not self._shared.begin_step(step):
            self._mailbox.receive_answer(Tag.GO, self._rank)
        arrived = self._now
        write(self._parameters, run.weights.tensors if weights is None else run.weights.views_of(weights))
        state = update.apply(self._gradients)
        if self._shared.end_step(self._parameters, step):
            self._mailbox.note(self._rank, Tag.FREE)
        updated = self._now
        run.turn += 1
        run.work.take(run.turn)
        hidden = waited - self._began if self._num_bytes else 0.0
        num_bytes = self._num_bytes + self._shared.take_answered_bytes()
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
        if wish and not self._run.work.is_stopped:
            self._mailbox.note(0, Tag.STOP)
        return self._run.work.is_stopped

    def dismiss(self) -> None:
        """All are to stop, and this rank does at once: it does not take the turn that was dealt to it."""
        self._mailbox.note(0, Tag.STOP)
        self._run.averaging.leave(self._run.turn)

    def sum(self, tensor: Tensor) -> Tensor:
        self._has_ended = True
        self._num_sums += 1
        self._mailbox.send(responder_address(self._size, 0), Tag.SUM, [tensor], number=self._num_sums)
        self._mailbox.settle()
        return self._mailbox.receive_answer(Tag.TOTAL, 0, number=self._num_sums).tensors[0].to(tensor.device)

    def depart(self) -> None:
        """Nobody leaves before all have ended: they may still ask this rank, or be asked by it."""
        if self._mailbox.run >= 0:
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
        with use_point(model.parameters, {**model.parameters, **self._run.weights.views_of(mean)}):
            yield Consensus(SoloReplicas(), values)

    def _look(self) -> dict[int, Sequence[Tensor]]:
        """Copies of the weights of all that are left, in the order of ranks."""
        run, number = self._run, self._run.num_looks
        run.num_looks += 1
        wanted = run.replay.means.get(number, ()) if run.replay is not None else self._mailbox.alive()
        for rank in wanted:
            self._mailbox.note(rank, Tag.LOOK, number=number)
        copies: dict[int, Sequence[Tensor]] = {}
        for rank in wanted:
            with suppress(PeerLostError):
                copies[rank] = self._mailbox.receive_answer(Tag.VIEW, rank, number=number).tensors
        self._shared.note(Mean(number, tuple(copies)))
        return copies

    def memory(self) -> Mapping[str, Entry]:
        return {}

    @property
    def _rank(self) -> int:
        return self._shared.rank

    @property
    def _size(self) -> int:
        return self._settings.size

    @property
    def _run(self) -> GossipRun:
        assert self._current is not None, "join() comes first"
        return self._current

    @property
    def _now(self) -> float:
        return self._mailbox.mailbox.clock.now()
