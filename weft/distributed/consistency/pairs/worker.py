"""A worker that gossips over the mailbox: it computes, averages with neighbours, and evaluates if it is rank 0."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, PackedTensors, make_codec
from weft.distributed.consistency.control import Journal
from weft.distributed.consistency.graphs import make_mixing
from weft.distributed.consistency.own_steps import OwnSteps
from weft.distributed.consistency.pairs.averaging import AbstractAveraging, NeighbourAveraging, PairAveraging
from weft.distributed.consistency.pairs.events import Mean, ReplayPlan, rank_journal
from weft.distributed.consistency.pairs.protocol import RunMailbox, Tag, responder_address
from weft.distributed.consistency.pairs.turns import GossipTurns
from weft.distributed.consistency.pairs.weights import SharedWeights
from weft.distributed.mailbox import AbstractMailbox
from weft.errors import PeerLostError
from weft.graph import GradientSink, State
from weft.planning.gossip_graphs import make_split
from weft.specs import Choice, Mesh
from weft.training.checkpoint import Entry
from weft.training.gradients import use_point
from weft.training.optimizers import OptimizerState
from weft.training.placement import AbstractPlacement, WholeModel
from weft.training.replicas import AbstractReplicas, Consensus, SoloReplicas, Traffic, Update
from weft.training.sampling import share

__all__ = ["GossipReplicas", "GossipSettings"]

AS_IT_IS = Choice("none")


@dataclass(frozen=True)
class GossipSettings:
    """The settings that all ranks of one plan share.

    Args:
        in_pairs: meet one neighbour in a turn (AD-PSGD), and take work as it is dealt; else all (D-PSGD), on one's own
            share of every batch.
        run: the run folder, where each rank records what happens to it.
        replay: by seed, what every rank is to do again; None to train anew.
        patience: seconds to wait for an answer.
        compress: what is sent instead of weights.
    """

    graph: str
    size: int
    in_pairs: bool = True
    plan: str = ""
    run: Path | None = None
    replay: Mapping[int, Sequence[ReplayPlan]] | None = None
    patience: float = 3600.0
    compress: Choice = AS_IT_IS

    def make_averaging(
        self, mailbox: RunMailbox, weights: PackedTensors, replay: ReplayPlan | None, seed: int
    ) -> AbstractAveraging:
        codec = self.make_codec()
        if self.in_pairs:
            return PairAveraging(mailbox, weights, replay, codec, split=make_split(self.graph, self.size), seed=seed)
        return NeighbourAveraging(mailbox, weights, replay, codec, graph=make_mixing(self.graph, self.size).graph)

    def make_codec(self) -> AbstractCodec:
        """For one end."""
        return make_codec(self.compress, "neighbours")


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
        self._current: tuple[GossipTurns, OwnSteps] | None = None
        self._has_ended = False
        self._num_sums = 0

    @property
    def mesh(self) -> Mesh:
        return Mesh(self._shared.rank, data=self._settings.size)

    @property
    def placement(self) -> AbstractPlacement:
        return WholeModel()

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
        weights, plans = PackedTensors(self._parameters, self._mailbox.mailbox.empty), self._settings.replay
        replay = plans[self._seed][self._rank] if plans is not None else None
        events, codec = replay.events if replay else (), self._settings.make_codec()
        self._shared.begin(self._mailbox.run, weights, self._open_journal(first), events, codec)
        averaging = self._settings.make_averaging(self._mailbox, weights, replay, self._seed)
        self._mailbox.note(self._rank, Tag.FREE)
        turns = GossipTurns(self._mailbox, self._shared, averaging, self._parameters, replay)
        self._current = turns, OwnSteps(turns)

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
        return self._steps.begin(self._run.turn, weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        run = self._run
        if run.replay is not None and not run.replay.has_completed(run.turn):  # here it died
            run.work.is_stopped = True
            return self._steps.own_loss(loss), update.state
        return self._steps.finish(loss, update)

    def traffic(self) -> Traffic:
        return self._run.traffic()

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
        self._run.leave()

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

    def current_weights(self) -> Mapping[str, Tensor]:
        """This rank's weights with what its responder has made of them since its last step. Nobody else may be taking
        one."""
        return self._run.weights.tensors

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
    def _run(self) -> GossipTurns:
        assert self._current is not None, "join() comes first"
        return self._current[0]

    @property
    def _steps(self) -> OwnSteps:
        assert self._current is not None, "join() comes first"
        return self._current[1]
