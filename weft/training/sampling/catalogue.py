"""Every sampler by name."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.datasets.dataset import AbstractDataset
from weft.training.sampling.order import Bucketed, Ordered, Shuffled, Weighted
from weft.training.sampling.sampler import Sampler

__all__ = ["SAMPLERS", "bucketed", "ordered", "shuffled", "weighted"]


def ordered(dataset: AbstractDataset, batch_size: int, seed: int, *, drop_last: bool = False) -> Sampler:
    """As the data set has them."""
    return Sampler(Ordered(len(dataset)), batch_size, drop_last)


def shuffled(dataset: AbstractDataset, batch_size: int, seed: int, *, drop_last: bool = False) -> Sampler:
    """A fresh permutation every epoch."""
    return Sampler(Shuffled(len(dataset), seed), batch_size, drop_last)


def bucketed(dataset: AbstractDataset, batch_size: int, seed: int, *, drop_last: bool = False) -> Sampler:
    """Batches of samples of similar length."""
    lengths = dataset.lengths()
    if lengths is None:
        raise UsageError("samples have no lengths to sort by (sampler: bucketed); use sampler=shuffled")
    return Sampler(Bucketed(lengths, batch_size, seed), batch_size, drop_last)


def weighted(
    dataset: AbstractDataset,
    batch_size: int,
    seed: int,
    *,
    class_weights: tuple[float, ...] | None = None,
    num_samples: int | None = None,
    replacement: bool = True,
    drop_last: bool = False,
) -> Sampler:
    """Samples by the weight of their class: unless told, classes are balanced (each inverse to its frequency)."""
    labels = dataset.labels()
    if labels is None:
        raise UsageError("samples have no classes to weigh (sampler: weighted); use sampler=shuffled")
    per_class = _balancing(labels) if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
    if len(labels) and int(labels.max()) >= len(per_class):
        raise UsageError(
            f"class without a weight (class: {int(labels.max())}, class_weights: {len(per_class)}); "
            "give one weight per class"
        )
    return Sampler(Weighted(per_class[labels], seed, num_samples, replacement), batch_size, drop_last)


def _balancing(labels: Tensor) -> Tensor:
    return labels.bincount().to(torch.float64).reciprocal()


SAMPLERS: Mapping[str, Callable[..., Sampler]] = {
    "bucketed": bucketed,
    "ordered": ordered,
    "shuffled": shuffled,
    "weighted": weighted,
}
