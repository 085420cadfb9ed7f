"""The models and data that hosts train: small batches, so that communication is to computation as on an accelerator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.mnist import fashion_mnist
from weft.training.datasets.text import pydoc
from weft.training.models import char_lstm, mlp

__all__ = ["BATCH_PER_RANK", "WORKLOADS", "Workload", "accuracy_of"]

BATCH_PER_RANK = 8
EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Args:
        load: the data, of at most so many training samples.
        build: the model, for the data's task.
        lr: of SGD with momentum 0.9 at the batch of four ranks.
    """

    load: Callable[[int], Splits]
    build: Callable[[Any], nn.Module]
    lr: float
    max_norm: float | None = None

    def samples(self, dataset: AbstractDataset, limit: int) -> TensorDataset:
        """The first ones, as tensors."""
        batch = dataset.take(torch.arange(min(limit, len(dataset))))
        return TensorDataset(*batch.inputs, *batch.targets)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@torch.no_grad()
def accuracy_of(model: nn.Module, samples: TensorDataset) -> float:
    """The share of targets (classes, or next characters) that the model gives the highest value."""
    model.eval()
    num_right = num_targets = 0
    for first in range(0, len(samples), EVALUATION_BATCH):
        inputs, targets = samples[first : first + EVALUATION_BATCH]
        num_right += int((model(inputs).argmax(-1) == targets).sum())
        num_targets += targets.numel()
    model.train()
    return num_right / num_targets


# 24.9 million and 10.2 million parameters.
WORKLOADS = {
    "mlp": Workload(
        load=lambda limit: fashion_mnist(limit=limit),
        build=lambda task: mlp(task, hidden=(4096, 4096, 1200)),
        lr=0.02,
    ),
    "lstm": Workload(
        load=lambda _: pydoc(sequence_length=32),
        build=lambda task: char_lstm(task, embedding=128, hidden=896, num_layers=2),
        lr=0.5,
        max_norm=1.0,
    ),
}
