"""Classified images that are kept as bytes and scaled when they are taken."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.datasets.checksum import checksum_of
from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.splitting import cut, fixed_order

__all__ = ["PixelDataset", "splits_from_pixels", "standardise"]


class PixelDataset(AbstractDataset):
    """Images of uint8 (samples, channels, height, width), given out as standardised float32."""

    def __init__(self, pixels: Tensor, classes: Tensor, mean: Sequence[float], std: Sequence[float]) -> None:
        self._pixels = pixels
        self._classes = classes
        self._mean = mean
        self._std = std

    def __len__(self) -> int:
        return len(self._pixels)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        return Batch((standardise(self._pixels[indices], self._mean, self._std),), (self._classes[indices],))

    def checksum(self) -> str:
        return self._checksum

    def labels(self) -> Tensor:
        return self._classes

    @cached_property
    def _checksum(self) -> str:
        return checksum_of(self._pixels, self._classes)


def standardise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """uint8 (..., channels, height, width) to float32 with the given mean and deviation per channel, in [0, 1]."""
    shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))
    return (pixels.to(torch.float32) / 255 - shift) / scale


def splits_from_pixels(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    num_classes: int,
    validation_share: int,
    limit: int | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> Splits:
    """Splits of (pixels, classes) pairs: one in `validation_share` training images is set aside, in a fixed order.

    `limit` keeps that many of the remaining training images, for quick runs.
    """
    kept, aside = cut(fixed_order(len(train[0])), (validation_share - 1, 1))
    if limit is not None and not 0 < limit <= len(kept):
        raise UsageError(f"limit is not a number of training samples (limit: {limit}, samples: {len(kept)}); lower it")
    parts = (_select(train, kept[:limit]), _select(train, aside), test)
    task = TaskSpec(TensorSpec(tuple(train[0].shape[1:])), num_classes)
    return Splits(name, task, *(PixelDataset(pixels, classes, mean, std) for pixels, classes in parts))


def _select(pair: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    return pair[0][indices], pair[1][indices]
