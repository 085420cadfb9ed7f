"""When to write a checkpoint: every so many steps, every so many seconds, and at the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.training.checkpoint import write_checkpoint
from weft.training.loop import TrainingState
from weft.training.recipe import Mutable
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.snapshot import take_snapshot

__all__ = ["Checkpointer"]


class Checkpointer:
    """Called with the state after every step; writes it when it is due.

    Args:
        folder: where the checkpoints of this repetition go.
        settings: the recipe's `checkpoint_steps` and `checkpoint_seconds`.
        progress: what else the checkpoint must carry, asked for when it is written.
        replicas: the ranks that save together; rank 0 decides when, and writes.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mutable,
        progress: Callable[[], dict[str, Any]],
        replicas: AbstractReplicas | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas or SoloReplicas()
        self._folder = folder
        self._every_steps = settings.checkpoint_steps
        self._every_seconds = settings.checkpoint_seconds
        self._progress = progress
        self._clock = clock
        self._written_at = clock()
        self._written_step: int | None = None

    def __call__(self, state: TrainingState) -> None:
        is_due = self._replicas.rank == 0 and self._is_due(state.step)
        if self._replicas.sum(torch.tensor([float(is_due)])).item():
            self.write(state)

    def write(self, state: TrainingState) -> None:
        """Write now, unless this very step is on disk already."""
        if state.step == self._written_step:
            return
        snapshot = take_snapshot(state, self._progress(), self._replicas)
        if self._replicas.rank == 0:
            write_checkpoint(self._folder, snapshot)
        self._written_at, self._written_step = self._clock(), state.step

    def _is_due(self, step: int) -> bool:
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        by_time = self._every_seconds is not None and self._clock() - self._written_at >= self._every_seconds
        return by_steps or by_time
