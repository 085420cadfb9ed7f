"""The data set seam: samples by index, as batches."""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from weft.specs import CPU, Batch, TaskSpec

__all__ = ["AbstractDataset", "DatasetOnDevice", "Splits"]


class AbstractDataset(ABC):
    """Samples that can be taken by index, in any order, by any rank."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        """The samples at `indices` (int64, one dimension), stacked.

        Random augmentation is a function of the sample's index and the epoch alone, so that a sample looks the same
        whichever rank takes it and after every resume.
        """

    @abstractmethod
    def checksum(self) -> str:
        """SHA-256 of the raw data, as hexadecimal text."""

    def lengths(self) -> Tensor | None:
        """The length of every sample where samples differ in length (what bucketing sorts by), else None."""
        return None

    def has_padding(self) -> bool:
        """Whether some targets are IGNORED, so that samples differ in how much they weigh."""
        return self.lengths() is not None

    def num_targets(self, indices: Tensor) -> int:
        """`num_targets` of the batch of these samples. Where some are padding, ranks that do not meet ask it of whole
        global batches, of which each takes a share: what can count without decoding should."""
        return self.take(indices).num_targets

    def labels(self) -> Tensor | None:
        """The class of every sample where it has one (what weighting balances), else None. Costs no decoding."""
        return None


@final
class DatasetOnDevice(AbstractDataset):
    """Wraps any data set: batches are moved to a device, or to another type, when they are taken. Facts about the data
    stay on the CPU, where samplers ask for them."""

    def __init__(self, inner: AbstractDataset, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._inner = inner
        self._device = device
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._inner)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        return self._inner.take(indices, epoch).to(device=self._device, dtype=self._dtype)

    def checksum(self) -> str:
        return self._inner.checksum()

    def lengths(self) -> Tensor | None:
        return self._inner.lengths()

    def has_padding(self) -> bool:
        return self._inner.has_padding()

    def num_targets(self, indices: Tensor) -> int:
        return self._inner.num_targets(indices)

    def labels(self) -> Tensor | None:
        return self._inner.labels()


@dataclass(frozen=True)
class Splits:
    """A data set cut for training. The target is judged on `validation`, acceptance on `test`: a test set that
    picks the stopping point is no test set."""

    name: str
    task: TaskSpec
    train: AbstractDataset
    validation: AbstractDataset
    test: AbstractDataset

    def on(self, device: torch.device, dtype: torch.dtype | None = None) -> "Splits":
        """The same data, taken in batches of this device, numbers with a fraction in this type."""
        if device == CPU and dtype is None:
            return self
        train, validation, test = (
            DatasetOnDevice(part, device, dtype) for part in (self.train, self.validation, self.test)
        )
        return replace(self, train=train, validation=validation, test=test)

    def checksum(self) -> str:
        """SHA-256 over the checksums of the three parts: what a run record calls its data."""
        parts = (self.train, self.validation, self.test)
        return hashlib.sha256("".join(part.checksum() for part in parts).encode()).hexdigest()
