"""The executor of a stage: a rank's part of a step, micro-batch by micro-batch, in the order of a schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.pipeline.actions import Action, Schedule
from weft.distributed.placement.pipeline.completion import Completion
from weft.distributed.placement.pipeline.step import Charge, MicroBatch, RankOfPipeline, Step
from weft.distributed.placement.pipeline.transport import Transport
from weft.graph import AbstractExecutor, GradientSink, Outputs, State
from weft.graph.executors.non_finite import first_bad_of
from weft.graph.executors.random_state import fold_random_state, get_random_state
from weft.specs import Batch, Mesh

__all__ = ["Bubble", "PipelineExecutor", "micro_batches"]


@dataclass(frozen=True)
class Bubble:
    """The time of one step's passes on this rank, and how much of it the rank waited for others; seconds."""

    seconds: float = 0.0
    waited: float = 0.0

    @property
    def share(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0


def micro_batches(
    batch: Batch, num_micro: int, random: Tensor, *, training: bool, keeps_empty: bool = False
) -> list[MicroBatch]:
    """The parts of a batch; they weigh by their targets, or by their samples where there are no targets at all.

    Args:
        random: the state that the step begins with, from which every part has its own.
        keeps_empty: whether there are as many even where some have no samples.
    """
    parts = batch.split(num_micro, keeps_empty=keeps_empty)
    counts = [part.num_targets for part in parts]
    if not any(counts):
        counts = [len(part) for part in parts]
    total = max(1, sum(counts))
    device = batch.inputs[0].device
    return [
        MicroBatch(part, count / total, fold_random_state(random, i, device), _form(part, training))
        for i, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]


def _form(batch: Batch, training: bool) -> tuple[object, ...]:
    return (training, *((tuple(tensor.shape), tensor.dtype) for tensor in batch.inputs))


@final
class PipelineExecutor(AbstractExecutor):
    """Runs the chunks of one rank. All ranks of a replica call it with the same batch; the last stage has the loss and
    the predictions, the others a loss of 0 and no predictions.

    Args:
        group: all ranks of the mesh.
        schedule: from a number of micro-batches to what all stages do.
        tied: parameters that several stages hold, and which stages.
    """

    def __init__(
        self,
        rank: RankOfPipeline,
        group: AbstractGroup,
        mesh: Mesh,
        schedule: Callable[[int], Schedule],
        num_micro: int,
        tied: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._rank = rank
        self._clock = group.clock
        self._transport = Transport(group, mesh, rank.wiring, rank.device, rank.wire_format)
        self._num_micro = num_micro
        # Where samples of several replicas meet in a layer, all take the same passes.
        self._keeps_empty = mesh.size("expert") > 1 or mesh.size("linear") > 1
        self._schedule = lru_cache(maxsize=None)(schedule)
        modules = [program.module for program in rank.programs]
        self._modules = modules
        self._parameters = {name: p for module in modules for name, p in module.named_parameters()}
        self._buffers = {name: buffer for module in modules for name, buffer in module.named_buffers()}
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._completion = Completion(trained, [own.keys() for own in rank.trained], tied)
        self._charge: Charge = _free
        self._first_bad: str | None = None
        self._passed = Bubble()
        self.bubble = Bubble()
        """Of the last step."""

    @property
    def chunks(self) -> tuple[tuple[str, ...], ...]:
        """The names of trainable parameters of each chunk."""
        return tuple(map(tuple, self._rank.trained))

    @property
    def activation_bytes(self) -> int:
        """Of values and gradients that this rank has sent so far."""
        return self._transport.num_bytes

    def charge_with(self, charge: Charge) -> None:
        """Let time pass for every action: on the virtual cluster computation takes none by itself."""
        self._charge = charge

    def measured(self) -> Mapping[str, float]:
        return {"bubble_share": self._passed.share}

    def initial_state(self) -> State:
        return State(self._parameters, self._buffers, get_random_state(self._rank.device))

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        self.adopt(state)
        for module in self._modules:
            module.train()
        micros = self._cut(batch, state, training=True)
        began, self._transport.waited = self._clock.now(), 0.0
        self._completion.begin(on_gradient)
        step = Step(self._rank, self._transport, micros, self._completion, self._charge)
        step.run(self._actions(len(micros)))
        self.bubble = Bubble(self._clock.now() - began, self._transport.waited)
        self._passed = Bubble(self._passed.seconds + self.bubble.seconds, self._passed.waited + self.bubble.waited)
        self._completion.finish(self._transport)
        self._transport.flush()
        self._first_bad = step.first_bad
        random = fold_random_state(state.random, -1, self._rank.device)
        return self._outputs(step, None), State(self._parameters, self._buffers, random)

    def infer(self, state: State, batch: Batch) -> Outputs:
        self.adopt(state)
        for module in self._modules:
            module.eval()
        micros = self._cut(batch, state, training=False)
        step = Step(self._rank, self._transport, micros, None, self._charge)
        with torch.no_grad():
            step.run([action for action in self._actions(len(micros)) if action.kind == "forward"])
            self._transport.flush()
            return self._outputs(step, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        """Of this stage: the others cannot be asked, as they may have none to tell of."""
        self.adopt(state)
        return (
            first_bad_of("input", {str(i): tensor for i, tensor in enumerate(batch.inputs)})
            or first_bad_of("target", {str(i): tensor for i, tensor in enumerate(batch.targets)})
            or first_bad_of("parameter", self._parameters)
            or (f"{self._first_bad}, from a stage before" if self._first_bad else None)
        )

    def _cut(self, batch: Batch, state: State, *, training: bool) -> list[MicroBatch]:
        return micro_batches(batch, self._num_micro, state.random, training=training, keeps_empty=self._keeps_empty)

    def _actions(self, num_micro: int) -> tuple[Action, ...]:
        return self._schedule(num_micro).stages[self._rank.stage]

    def _outputs(self, step: Step, batch: Batch | None) -> Outputs:
        """Of an evaluation the loss is computed once, of all predictions."""
        nothing = torch.zeros((), device=self._rank.device)
        predictions = _join(step.predictions) if step.predictions else nothing
        if batch is None:
            return Outputs(torch.stack(step.losses).sum() if step.losses else nothing, predictions)
        if not step.predictions:
            return Outputs(nothing, nothing)
        with self._rank.context():
            return Outputs(self._rank.loss(predictions, *batch.targets), predictions)

    @torch.no_grad()
    def adopt(self, state: State) -> None:
        """A state that came from elsewhere is copied in."""
        for own, given in ((self._parameters, state.parameters), (self._buffers, state.buffers)):
            if own is given:
                continue
            for name, tensor in own.items():
                if given[name] is not tensor:
                    tensor.copy_(given[name])


def _join(parts: list[Any]) -> Any:
    """Predictions of micro-batches as those of the batch: tensors, or structures of tensors and numbers."""
    if len(parts) == 1:
        return parts[0]

    def join(*leaves: Any) -> Any:
        return torch.cat(leaves) if isinstance(leaves[0], Tensor) and leaves[0].dim() else leaves[0]

    return tree_map(join, *parts)


def _free(_action: Action, _num_samples: int) -> None:
    """Real computation takes its own time."""
