"""Evaluation of a model on one split."""

import math
from collections.abc import Sequence

import torch

from weft.graph import AbstractExecutor, State
from weft.metrics.quality import KINDS, QUALITY, Tally
from weft.training.datasets import AbstractDataset
from weft.training.replicas import AbstractReplicas, SoloReplicas

__all__ = ["evaluate"]

# Fixed, so that the bits of a value do not depend on the batch size that training happened to use.
BATCH_SIZE = 256


def evaluate(
    executor: AbstractExecutor,
    state: State,
    dataset: AbstractDataset,
    metrics: Sequence[str],
    replicas: AbstractReplicas | None = None,
) -> dict[str, float]:
    """The loss and the named metrics over every sample; a ragged last batch weighs by its targets.

    Batches are dealt out to the replicas in turn, and their tallies are added in the order of the batches, so that any
    number of replicas gives the same bits.
    """
    replicas = replicas or SoloReplicas()
    mesh = replicas.mesh
    names = ("loss", *metrics)
    batches = torch.arange(len(dataset)).split(BATCH_SIZE)
    numbers = torch.zeros(len(batches), len(names), 3, dtype=torch.float64)
    # Replicas that take every forward together compute with no samples where the others have the last ones.
    num_rounds = math.ceil(len(batches) / mesh.num_replicas)
    end = num_rounds * mesh.num_replicas if replicas.placement.takes_forwards_together else len(batches)
    for i in range(mesh.replica, end, mesh.num_replicas):
        batch = dataset.take(batches[i] if i < len(batches) else batches[0][:0])
        outputs = executor.infer(state, batch)
        if not replicas.placement.has_loss or i >= len(batches):
            continue
        for j, name in enumerate(names):
            tally = QUALITY[name](outputs.predictions, batch.targets, outputs.loss, batch.num_targets)
            numbers[i, j] = torch.tensor([KINDS.index(tally.kind), tally.amount, tally.count], dtype=torch.float64)
    rows = replicas.sum(numbers).tolist()
    tallies = [[Tally(KINDS[int(kind)], amount, int(count)) for kind, amount, count in row] for row in rows]
    return {name: sum(column, Tally()).value for name, column in zip(names, zip(*tallies, strict=True), strict=True)}
