"""Ranks of a pipeline that is never emptied: those of one stage meet in every step, stages do not.

Wishes to stop and to save go back with the gradients, decisions of stage 0 forward with the values:

    step t     stage 0   decides by the wishes that have come    --> [stop, save] of step t, to stage 1, 2, ...
               stage s   [wishes, loss] of step t               --> stage s - 1, which reads them in its step t + 1

so that all ranks stop, or save, after the same step, at most as many steps after the wish as there are stages, and none
ever waits for a message that the values and gradients themselves would not make it wait for.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.group import AbstractGroup, AbstractWork
from weft.distributed.group.calls import Send
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.placement.pipeline.pipedream import Minibatch, Stream
from weft.errors import PlanError
from weft.graph import GradientSink, State
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.optimizers import OptimizerState
from weft.training.placement import AbstractPlacement
from weft.training.replicas import AbstractReplicas, Consensus, Traffic, Update

__all__ = ["PipeDreamReplicas"]

_DECISION, _REPORT = 30_000, 30_001  # tags above those of values; MPI promises up to 32767


@final
class PipeDreamReplicas(AbstractReplicas):
    """Args:
    base: the ranks of this stage that hold the same part of it, which average gradients in every step.
    world: all ranks, which meet in evaluations and checkpoints alone.
    """

    def __init__(self, base: DataParallel, world: AbstractGroup, stream: Stream) -> None:
        self._base, self._world, self._stream = base, world, stream
        self._control = Control(world, base.group, base.mesh)
        self._due: Minibatch | None = None
        self._update: Update | None = None  # the last one, for a drain

    @property
    def mesh(self) -> Mesh:
        return self._base.mesh

    @property
    def placement(self) -> AbstractPlacement:
        return self._base.placement

    @property
    def is_synchronous(self) -> bool:
        return False

    @property
    def has_one_model(self) -> bool:
        """Drained, all stages have made the same updates."""
        return True

    def join(self, model: State) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters.values()):
            stage = self.mesh.coordinate("pipeline")
            raise PlanError(f"stage has no parameter that is trained (stage: {stage}); use fewer stages")
        self._settle()
        self._base.join(model)

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        return self._base.share(indices)

    def begin(self, weight: float) -> GradientSink:
        self._control.decide()
        self._due = self._stream.enter(weight)
        return _ignore

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        newest = self._stream.newest
        assert newest is not None, "begin() comes first"
        newest.lr = update.lr
        state = self._stream.newest_state(update.state)
        self._update = replace(update, state=state)
        total = loss
        if self._due is not None:
            total, state = self._go_back(loss, self._update)
            self._update = replace(update, state=state)
        return self._control.report(total if self.placement.has_loss else None), state

    def _go_back(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        """The backward pass and the update of the oldest minibatch."""
        oldest = self._stream.oldest
        sink = self._base.begin(oldest.weight)
        self._stream.go_back(sink)
        result = self._base.finish(loss, replace(update, lr=oldest.lr))
        self._stream.leave()
        return result

    def traffic(self) -> Traffic:
        return self._base.traffic()

    def agree_to_stop(self, wish: bool) -> bool:
        return self._control.agree("stop", wish)

    def agree_to_save(self, wish: bool) -> bool:
        is_granted = self._control.agree("save", wish)
        if is_granted:
            self._settle()
        return is_granted

    def dismiss(self) -> None:
        """All ranks evaluate, so all know."""

    def sum(self, tensor: Tensor) -> Tensor:
        self._world.all_reduce(tensor)
        return tensor

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        output = tensor.new_empty((self._world.size, *tensor.shape))
        self._world.all_gather(output, tensor.unsqueeze(0))
        return tuple(output)

    def collect(self, state: OptimizerState) -> OptimizerState:
        self._settle()
        return self._stream.newest_state(state)

    @contextmanager
    def use_consensus(self, model: State) -> Iterator[Consensus]:
        self._settle()
        with self._base.use_consensus(model):
            yield Consensus(self)

    def memory(self) -> Mapping[str, Entry]:
        return self._base.memory()

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        self._base.remember(step, entries)

    def _settle(self) -> None:
        """Drain the pipeline: the minibatches that are under way come back. All ranks call it after the same step."""
        update = self._update
        if update is not None:
            state = update.state
            while self._stream.num_waiting:
                _, state = self._go_back(0.0, replace(update, state=state))
            self._stream.renew(update.state, state)
        self._update = None
        self._stream.restart()
        self._control.settle()


def _ignore(_name: str, _gradient: Tensor | None) -> None:
    """Gradients come with the backward pass of a minibatch, which has a sink of its own."""


@final
class Control:
    """Wishes, decisions and losses between neighbouring stages.

    Args:
        group: the ranks of this stage that are of different replicas.
    """

    def __init__(self, world: AbstractGroup, group: AbstractGroup, mesh: Mesh) -> None:
        self._world, self._group = world, group
        stage = mesh.coordinate("pipeline")
        self._before = mesh.rank_in(stage - 1) if stage else None
        self._after = mesh.rank_in(stage + 1) if stage + 1 < mesh.pipeline else None
        self._is_unread = False  # a report of the stage after this one
        self._decision = {"stop": False, "save": False}
        self._wishes = {"stop": False, "save": False}
        self._loss = 0.0
        self._sending: list[AbstractWork] = []

    def decide(self) -> None:
        """Whether all ranks stop, and whether they save, after the step that begins."""
        if self._before is None:
            message = torch.tensor([float(wish) for wish in self._wishes.values()], dtype=torch.float64)
            if self._group.size > 1:
                self._group.all_reduce(message)
            self._wishes = dict.fromkeys(self._wishes, False)
        else:
            message = torch.empty(len(self._wishes), dtype=torch.float64)
            self._world.recv(message, self._before, _DECISION)
        self._decision = {name: bool(value) for name, value in zip(self._wishes, message.tolist(), strict=True)}
        self._send(message, self._after, _DECISION)

    def agree(self, question: str, wish: bool) -> bool:
        """Whether it was granted for this step; if not, the wish goes on its way."""
        is_granted = self._decision[question]
        if wish and not is_granted:
            self._wishes[question] = True
        return is_granted

    def report(self, loss: float | None) -> float:
        """Pass on what is known after a step, and the loss; the newest that is known here: None for no own."""
        self._read()
        self._is_unread = self._after is not None
        if loss is not None:
            self._loss = loss
        numbers = [*map(float, self._wishes.values()), self._loss]
        self._send(torch.tensor(numbers, dtype=torch.float64), self._before, _REPORT)
        if self._before is not None:
            self._wishes = dict.fromkeys(self._wishes, False)
        self._sending = [work for work in self._sending if not work.is_done()]
        return self._loss

    def settle(self) -> None:
        """Read what is left to read, and wait until everything has left."""
        self._read()
        works, self._sending = self._sending, []
        for work in works:
            work.wait()

    def _read(self) -> None:
        if not self._is_unread or self._after is None:
            return
        self._is_unread = False
        message = torch.empty(len(self._wishes) + 1, dtype=torch.float64)
        self._world.recv(message, self._after, _REPORT)
        *wishes, self._loss = message.tolist()
        self._wishes = {name: own or bool(new) for (name, own), new in zip(self._wishes.items(), wishes, strict=True)}

    def _send(self, message: Tensor, peer: int | None, tag: int) -> None:
        if peer is not None:
            self._sending.append(self._world.start(Send(message, peer, tag)))
