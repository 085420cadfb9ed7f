"""PipeDream: an asynchronous pipeline that is never emptied between steps (Narayanan et al., 2019).

    3 stages; capitals are forward passes, small letters backward passes, each followed by the stage's own update

    step      0     1     2       3       4
    stage 0   A     B     C a     D b     E c           stage s goes n - s - 1 minibatches ahead of its backward passes
    stage 1   A     B a   C b     D c     E d
    stage 2   A a   B b   C c     D d     E e

A step of the loop is a forward pass of its own minibatch, and the backward pass and update of one that came before. No
stage waits for another but for the values and gradients themselves. Before evaluations and checkpoints the pipeline is
drained: all minibatches under way come back, and all stages have made the same updates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.pipeline.actions import Action
from weft.distributed.placement.pipeline.executor import PipelineExecutor, micro_batches
from weft.distributed.placement.pipeline.pipedream_stash import Stash, StashedModule
from weft.distributed.placement.pipeline.step import Charge, MicroBatch, RankOfPipeline, Step
from weft.distributed.placement.pipeline.transport import Transport
from weft.graph import AbstractExecutor, GradientSink, Outputs, State
from weft.graph.executors.random_state import fold_random_state
from weft.specs import Batch, Mesh, Plan
from weft.training.optimizers import OptimizerState

__all__ = ["Minibatch", "PipeDreamExecutor", "Stream", "make_stream"]


@dataclass
class Minibatch:
    """One that is under way: what its update will need to know.

    Args:
        weight: of this replica's share in the mean over the minibatch.
        lr: the learning rate that the schedule has for it.
        is_empty: whether this replica has no sample of it.
    """

    number: int
    weight: float
    lr: float = 0.0
    is_empty: bool = True


@final
class Stream:
    """The minibatches of one stage, in their order: known to the executor, which computes, and to the replicas, which
    update."""

    def __init__(self, num_stages: int, stage: int, *, is_vertical: bool) -> None:
        self.num_stages, self.stage, self.is_vertical = num_stages, stage, is_vertical
        self._waiting: list[Minibatch] = []  # for their backward passes
        self._number = 0  # of minibatches that came in, since the pipeline was empty
        self._backward: Callable[[int, GradientSink], None] | None = None
        self._clear: Callable[[], None] = _nothing
        self._renewed: tuple[OptimizerState, OptimizerState] | None = None

    def attach(self, backward: Callable[[int, GradientSink], None], clear: Callable[[], None]) -> None:
        """Whoever computes backward passes, and forgets versions of weights."""
        self._backward, self._clear = backward, clear

    def enter(self, weight: float) -> Minibatch | None:
        """A minibatch comes in; the one whose backward pass follows in the same step, if there is one."""
        self._waiting.append(Minibatch(self._number, weight))
        self._number += 1
        return self._waiting[0] if len(self._waiting) > self.num_stages - self.stage - 1 else None

    @property
    def newest(self) -> Minibatch | None:
        return self._waiting[-1] if self._waiting else None

    @property
    def oldest(self) -> Minibatch:
        return self._waiting[0]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def go_back(self, sink: GradientSink) -> None:
        """The backward pass of the oldest minibatch."""
        assert self._backward is not None, "the placement's executor is there when training begins"
        if not self._waiting[0].is_empty:
            self._backward(self._waiting[0].number, sink)

    def leave(self) -> None:
        """The oldest minibatch has been used for an update."""
        self._waiting.pop(0)

    def restart(self) -> None:
        """The pipeline is empty."""
        assert not self._waiting, "drained before"
        self._number = 0
        self._clear()

    # The optimizer's state after a drain, of which the loop hears with its next step.

    def renew(self, before: OptimizerState, after: OptimizerState) -> None:
        self._renewed = (before, after)

    def newest_state(self, state: OptimizerState) -> OptimizerState:
        """A state, or the one that a drain has made of it since."""
        if self._renewed is not None and self._renewed[0] is state:
            return self._renewed[1]
        return state


def _nothing() -> None:
    """Nobody has attached."""


def make_stream(plan: Plan, mesh: Mesh) -> Stream | None:
    """Of a plan whose pipeline is asynchronous; None of another."""
    if not plan.is_streamed:
        return None
    is_vertical = plan.schedule.get("sync", "own") == "vertical"
    return Stream(plan.pipeline, mesh.coordinate("pipeline"), is_vertical=is_vertical)


@final
class PipeDreamExecutor(AbstractExecutor):
    """A forward pass of the batch it is called with, and a backward pass of one before.

    Args:
        whole: of the same stage, for evaluations, which are synchronous.
        group: all ranks of the mesh.
    """

    def __init__(
        self, whole: PipelineExecutor, rank: RankOfPipeline, group: AbstractGroup, mesh: Mesh, stream: Stream
    ) -> None:
        self._whole, self._stream = whole, stream
        self._module = rank.programs[0].module
        self._stashed = StashedModule(self._module)
        program = replace(rank.programs[0], module=self._stashed)
        self._rank = replace(rank, programs=(program,))
        self._transport = Transport(group, mesh, rank.wiring, rank.device, rank.wire_format)
        self._stash = Stash(rank.trained[0], stream.num_stages, stream.stage, is_vertical=stream.is_vertical)
        self._micros: dict[int, MicroBatch] = {}
        self._charge: Charge = _free
        self._step = self._new_step()
        stream.attach(self._backward, self._restart)

    @property
    def chunks(self) -> tuple[tuple[str, ...], ...]:
        return self._whole.chunks

    @property
    def activation_bytes(self) -> int:
        """As of the executor for evaluations, and those of the stream."""
        return self._whole.activation_bytes + self._transport.num_bytes

    def charge_with(self, charge: Charge) -> None:
        """As of the executor for evaluations."""
        self._charge = charge
        self._whole.charge_with(charge)

    def initial_state(self) -> State:
        return self._whole.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        own = self._stream.newest
        if own is None or not own.is_empty:
            return self._whole(state, batch, on_gradient)  # not a step of the loop: a probe, when all is drained
        self._whole.adopt(state)
        self._module.train()
        own.is_empty = False
        (self._micros[own.number],) = micro_batches(batch, 1, state.random, training=True)
        self._stashed.weights = self._stash.take(own.number)
        self._step.run([Action("forward", 0, own.number)])
        self._stashed.weights = {}  # those of the minibatch live on in its autograd graph
        losses, predictions = self._step.losses, self._step.predictions
        nothing = torch.zeros((), device=self._rank.device)
        outputs = Outputs(losses.pop(), predictions.pop()) if losses else Outputs(nothing, nothing)
        after = self._whole.initial_state()
        return outputs, replace(after, random=fold_random_state(state.random, -1, self._rank.device))

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._whole.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._whole.first_bad_tensor(state, batch)

    def _backward(self, number: int, sink: GradientSink) -> None:
        self._stash.begin(sink)
        self._step.run([Action("backward", 0, number)])
        del self._micros[number]
        self._transport.tidy()

    def _restart(self) -> None:
        self._stash.clear()
        self._transport.flush()
        self._step = self._new_step()

    def _new_step(self) -> Step:
        return Step(self._rank, self._transport, self._micros, self._stash, lambda *what: self._charge(*what))


def _free(_action: Action, _num_samples: int) -> None:
    """Real computation takes its own time."""
