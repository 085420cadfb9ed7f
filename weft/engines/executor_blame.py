"""From a difference between two executors to the operator that makes it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.engines.recorded_run import Piece, RecordedRun, cast_state
from weft.graph import (
    AbstractProgram,
    Difference,
    Graph,
    GraphExecutor,
    State,
    TapeProgram,
    capture,
    first_difference,
    training_step,
)
from weft.graph.structure import pick
from weft.specs import Batch
from weft.training.component import build
from weft.training.datasets import Splits
from weft.training.losses import LOSSES
from weft.training.models import MODELS

__all__ = ["blame_operator"]


def blame_operator(runs: Sequence[RecordedRun], splits: Splits, piece: Piece, tolerance: float) -> Difference | None:
    """Replay one call of both executors, the subject first in `runs`, one operator after the other."""
    sides = [_Side(run, splits, piece) for run in runs]
    subject, reference = sides
    return first_difference(
        subject.program, reference.program, subject.inputs, reference.inputs, piece.model.random, tolerance
    )


class _Side:
    """An executor as a program, and its inputs. What is not made of graphs (eager mode) is its captured step."""

    def __init__(self, run: RecordedRun, splits: Splits, piece: Piece) -> None:
        like = run.executor.initial_state()
        dtype = next((p.dtype for p in like.parameters.values() if p.is_floating_point()), torch.float32)
        state, batch = cast_state(piece.model, like), piece.batch.to(dtype=dtype)
        if isinstance(run.executor, GraphExecutor):
            self.program = run.executor.program(state, batch)
        else:
            self.program = _captured(run, splits, state, batch, dtype)
        self.inputs = _inputs(self.program.graph, state, batch)


def _captured(run: RecordedRun, splits: Splits, state: State, batch: Batch, dtype: torch.dtype) -> AbstractProgram:
    fixed = run.recipe.fixed
    module: nn.Module = build(fixed.model, MODELS, "model", splits.task)
    step = training_step(module.to(dtype).train(), build(fixed.loss, LOSSES, "loss"))
    return TapeProgram(capture(step, *_plain(state, batch)))


def _inputs(graph: Graph, state: State, batch: Batch) -> list[Tensor]:
    tensors, data = _plain(state, batch)
    return pick(graph.arguments, {"state": tensors, "batch": data}, len(graph.placeholders))


def _plain(state: State, batch: Batch) -> tuple[dict[str, object], dict[str, object]]:
    return (
        {"parameters": state.parameters, "buffers": state.buffers},
        {"inputs": batch.inputs, "targets": batch.targets},
    )
