"""From a difference between two executors to the operator that makes it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.graph import (
    AbstractExecutor,
    AbstractProgram,
    Difference,
    Graph,
    HasPrograms,
    Loss,
    State,
    TapeProgram,
    capture,
    first_difference,
    inference_step,
    training_step,
)
from weft.graph.ir.pytree import flatten_as
from weft.proving.recorded_run import ExecutorCall, cast_state
from weft.specs import Batch
from weft.training.build import EXECUTORS
from weft.training.component import build
from weft.training.datasets import Splits
from weft.training.losses import LOSSES
from weft.training.models import MODELS
from weft.training.recipe import Recipe

__all__ = ["blame_operator"]


def blame_operator(
    recipes: Sequence[Recipe], splits: Splits, piece: ExecutorCall, tolerance: float, *, is_training: bool = True
) -> Difference | None:
    """Replay one call of two executors, the subject first in `recipes`, one operator after the other."""
    subject, reference = (_Side(recipe, splits, piece, is_training) for recipe in recipes)
    return first_difference(
        subject.program, reference.program, subject.inputs, reference.inputs, piece.model.random, tolerance
    )


class _Side:
    """An executor as a program, and its inputs. What is not made of graphs (eager mode) is its captured step."""

    def __init__(self, recipe: Recipe, splits: Splits, piece: ExecutorCall, is_training: bool) -> None:
        module: nn.Module = build(recipe.fixed.model, MODELS, "model", splits.task)
        loss: Loss = build(recipe.fixed.loss, LOSSES, "loss")
        executor: AbstractExecutor = build(recipe.mutable.executor, EXECUTORS, "executor", module, loss)
        like = executor.initial_state()
        dtype = next((p.dtype for p in like.parameters.values() if p.is_floating_point()), torch.float32)
        state, batch = cast_state(piece.model, like), piece.batch.to(dtype=dtype)
        if isinstance(executor, HasPrograms):
            self.program: AbstractProgram = executor.program(state, batch, is_training=is_training)
        else:
            make_step = training_step if is_training else inference_step
            step = make_step(module.to(dtype).train(is_training), loss)
            self.program = TapeProgram(capture(step, *_plain(state, batch)))
        self.inputs = _inputs(self.program.graph, state, batch)


def _inputs(graph: Graph, state: State, batch: Batch) -> list[Tensor]:
    tensors, data = _plain(state, batch)
    return flatten_as(graph.arguments, {"state": tensors, "batch": data}, len(graph.placeholders))


def _plain(state: State, batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"parameters": state.parameters, "buffers": state.buffers},
        {"inputs": batch.inputs, "targets": batch.targets},
    )
