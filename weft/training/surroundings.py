"""The surroundings of a training: its clock, its data, and wrappers of its parts."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.records.record_file import CLOCK_RULES
from weft.training.build import build_splits
from weft.training.datasets import Splits
from weft.training.events import Event, Listener
from weft.training.loop import Task
from weft.training.recipe import Recipe

__all__ = ["Surroundings"]


def _as_it_is(task: Task) -> Task:
    return task


def _hear_nothing(_event: Event) -> None:
    pass


@dataclass(frozen=True)
class Surroundings:
    """This machine and its clock, unless said otherwise.

    A virtual training takes the time of `now`. What the machine itself spends (memory, energy, operations per second)
    says nothing about it and is not measured; it is started anew rather than resumed, so it keeps no checkpoints.
    """

    now: Callable[[], float] = time.time  # seconds
    load: Callable[[Recipe], Splits] = build_splits
    prepare: Callable[[Task], Task] = _as_it_is
    listen: Listener = _hear_nothing  # on every rank, where other listeners are on rank 0 alone
    clock_rules: str = CLOCK_RULES
    is_virtual: bool = False
    device: torch.device | None = None  # of this rank; None as the recipe wishes
