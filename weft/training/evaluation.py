"""Evaluation of a model on one split."""

from collections.abc import Sequence

import torch

from weft.graph import AbstractExecutor, State
from weft.metrics.quality import QUALITY, Tally
from weft.training.datasets import AbstractDataset

__all__ = ["evaluate"]

# Fixed, so that the bits of a value do not depend on the batch size that training happened to use.
BATCH_SIZE = 256


def evaluate(
    executor: AbstractExecutor, state: State, dataset: AbstractDataset, metrics: Sequence[str]
) -> dict[str, float]:
    """The loss and the named metrics over every sample; a ragged last batch weighs by its targets."""
    tallies = {name: Tally() for name in ("loss", *metrics)}
    for indices in torch.arange(len(dataset)).split(BATCH_SIZE):
        batch = dataset.take(indices)
        outputs = executor.infer(state, batch)
        for name, tally in tallies.items():
            tallies[name] = tally + QUALITY[name](outputs.predictions, batch.targets, outputs.loss, batch.num_targets)
    return {name: tally.value for name, tally in tallies.items()}
