"""A training whose every call of its executor is kept: what it began with, and what it made."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor

from weft.graph import AbstractExecutor, GradientSink, Outputs, State
from weft.specs import Batch
from weft.training.build import build_task
from weft.training.datasets import Splits
from weft.training.loop import Task, take_step
from weft.training.recipe import Recipe

__all__ = ["ExecutorCall", "RecordedRun", "call_executor", "cast_state"]


@dataclass(frozen=True)
class ExecutorCall:
    """One call of an executor, on a batch or a micro-batch. Gradients, loss, predictions and buffers are copies."""

    model: State
    batch: Batch
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)


class RecordedRun:
    """A training from step 0, one step at a time.

    Args:
        is_recorded: keep every call of the executor. Where a step and its update are one graph there is no such call:
            a run that is not recorded trains as `weft run` would.
    """

    def __init__(self, recipe: Recipe, splits: Splits, seed: int, *, is_recorded: bool = True) -> None:
        self.recipe = recipe
        task, self.state = build_task(recipe, splits, seed)
        self.executor = task.executor
        self.is_in_one = task.step_in_one is not None
        self._recorder = _Recorder(task.executor)
        self._task: Task = replace(task, executor=self._recorder) if is_recorded else task
        self.last_loss = float("nan")

    def take_step(self) -> list[ExecutorCall]:
        self._recorder.pieces.clear()
        self.state, result = take_step(self._task, self.state)
        self.last_loss = result.loss
        return list(self._recorder.pieces)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters, and the optimizer's slots: Adam takes the same step for a gradient and for twice that."""
        slots = self.state.optimizer.slots.items()
        named = {f"{name} ({slot})": tensor for name, own in slots for slot, tensor in own.items()}
        return {**self.state.model.parameters, **named}


def call_executor(executor: AbstractExecutor, model: State, batch: Batch) -> ExecutorCall:
    """Call an executor once, on copies in its own floating-point type."""
    recorder = _Recorder(executor)
    recorder(cast_state(model, executor.initial_state()), batch, lambda _name, _gradient: None)
    (piece,) = recorder.pieces
    return piece


@final
class _Recorder(AbstractExecutor):
    """Hands on what an executor computes, and keeps copies."""

    def __init__(self, inner: AbstractExecutor) -> None:
        self._inner = inner
        self.pieces: list[ExecutorCall] = []

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        piece = ExecutorCall(cast_state(state, state), batch)

        def note(name: str, gradient: Tensor | None) -> None:
            piece.gradients[name] = None if gradient is None else gradient.clone()
            on_gradient(name, gradient)

        outputs, after = self._inner(state, batch, note)
        piece.results.update({"loss": outputs.loss.clone(), "predictions": outputs.predictions.clone()})
        piece.results.update({f"buffer {name}": tensor.clone() for name, tensor in after.buffers.items()})
        self.pieces.append(piece)
        return outputs, after

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._inner.first_bad_tensor(state, batch)


def cast_state(model: State, like: State) -> State:
    """A copy, in the types of another."""

    def cast(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies: dict[int, Tensor] = {}  # a tensor under two names stays one
        for name, tensor in tensors.items():
            fresh = torch.empty_like(tensor, dtype=wanted[name].dtype, requires_grad=False)
            copies.setdefault(id(tensor), fresh.copy_(tensor.detach()))
        return {name: copies[id(tensor)] for name, tensor in tensors.items()}

    return State(
        cast(model.parameters, like.parameters), cast(model.buffers, like.buffers), model.random.detach().clone()
    )
