"""When to write a checkpoint: every so many steps, every so many seconds, and at the end."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.training.checkpoint import write_checkpoint
from weft.training.loop import TrainingState
from weft.training.recipe import Mutable
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.snapshot import ranks_of, take_snapshot

__all__ = ["Checkpointer"]


class Checkpointer:
    """Called with the state after every step; writes it when it is due.

    Args:
        folder: where the checkpoints of this repetition go.
        settings: the recipe's `checkpoint_steps` and `checkpoint_seconds`.
        progress: what else the checkpoint must carry, asked for when it is written.
        replicas: the ranks that save together; rank 0 decides when, and each writes its part.
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
        self._counted_from: int | None = None  # the last step that was written, or the one before the first seen

    def __call__(self, state: TrainingState) -> None:
        is_due = self._replicas.mesh.rank == 0 and self._is_due(state.step)
        if self._replicas.agree_to_save(is_due):
            self.write(state)

    def write(self, state: TrainingState) -> None:
        """Write now, unless this very step is on disk already."""
        if state.step == self._written_step:
            return
        snapshot = take_snapshot(state, self._progress(), self._replicas)
        write_checkpoint(self._folder, snapshot, ranks_of(self._replicas))
        self._written_at, self._written_step = self._clock(), state.step
        self._counted_from = state.step

    def _is_due(self, step: int) -> bool:
        """Whether a multiple of the steps, or the time, has passed since the last one; and so until it is written, for
        ranks that do not meet in every step cannot write at once."""
        if self._counted_from is None:
            self._counted_from = step - 1
        every = self._every_steps
        by_steps = every is not None and step // every > self._counted_from // every
        by_time = self._every_seconds is not None and self._clock() - self._written_at >= self._every_seconds
        return by_steps or by_time
