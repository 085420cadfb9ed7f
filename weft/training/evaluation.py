"""Evaluation of a model on one split."""

from collections.abc import Sequence

import torch

from weft.graph import AbstractExecutor, State
from weft.metrics.quality import QUALITY
from weft.training.datasets import AbstractDataset

__all__ = ["evaluate"]

# Fixed, so that the bits of a value do not depend on the batch size that training happened to use.
BATCH_SIZE = 256


def evaluate(
    executor: AbstractExecutor, state: State, dataset: AbstractDataset, metrics: Sequence[str]
) -> dict[str, float]:
    """The loss and the named metrics over every sample; a ragged last batch weighs by its samples."""
