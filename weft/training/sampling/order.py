"""The order in which an epoch visits the samples: a pure function of its arguments and the epoch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.datasets.draws import permutation, uniform

__all__ = ["AbstractOrder", "Bucketed", "Ordered", "Shuffled", "Weighted"]


class AbstractOrder(ABC):
    """Keeps nothing between calls, so that any rank, at any time, gets the same order for an epoch."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples in an epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Tensor:
        """The indices of the epoch's samples (int64)."""


@dataclass(frozen=True)
class Ordered(AbstractOrder):
    """As the data set has them, every epoch."""

    size: int

    def __len__(self) -> int:
        return self.size

    def order(self, epoch: int) -> Tensor:
        return torch.arange(self.size)


@dataclass(frozen=True)
class Shuffled(AbstractOrder):
    """A permutation, a fresh one every epoch."""

    size: int
    seed: int

    def __len__(self) -> int:
        return self.size

    def order(self, epoch: int) -> Tensor:
        return permutation(self.size, self.seed, epoch)


@dataclass(frozen=True, eq=False)
class Bucketed(AbstractOrder):
    """Batches of similar length in random order, so that little is padded.

    by length   | 1 2 2 | 3 3 4 | 5 | 7 8 9 |       ties broken afresh, the short batch at a random place
    given out   | 7 8 9 | 1 2 2 | 3 3 4 | 5 |       whole batches shuffled, the short one last
    """

    lengths: Tensor
    batch_size: int
    seed: int

    def __len__(self) -> int:
        return len(self.lengths)

    def order(self, epoch: int) -> Tensor:
        shuffled = permutation(len(self), self.seed, epoch, 0)
        by_length = shuffled[self.lengths[shuffled].argsort(stable=True)]
        num_whole, num_left = divmod(len(self), self.batch_size)
        start = int(uniform(self.seed, epoch, 1) * (num_whole + 1)) * self.batch_size
        left = by_length[start : start + num_left]
        whole = torch.cat([by_length[:start], by_length[start + num_left :]]).reshape(num_whole, self.batch_size)
        return torch.cat([whole[permutation(num_whole, self.seed, epoch, 2)].flatten(), left])


@dataclass(frozen=True, eq=False)
class Weighted(AbstractOrder):
    """Samples drawn with probability in proportion to their weights, with or without replacement."""

    weights: Tensor
    seed: int
    num_samples: int | None = None  # in an epoch; as many as there are weights unless told
    replacement: bool = True

    def __post_init__(self) -> None:
        wrong = self.weights[~(self.weights.isfinite() & (self.weights >= 0))]
        if len(wrong):
            raise UsageError(f"weight is not a finite number from 0 up (weight: {float(wrong[0])}); change it")
        if self.num_samples is not None and self.num_samples < 1:
            raise UsageError(f"epoch without samples (num_samples: {self.num_samples}); raise num_samples")
        num_drawable = int((self.weights > 0).sum())
        if len(self) > num_drawable and not (self.replacement and num_drawable):
            raise UsageError(
                f"too few samples have a weight above 0 (num_samples: {len(self)}, found: {num_drawable}); "
                "lower num_samples or sample with replacement"
            )

    def __len__(self) -> int:
        return len(self.weights) if self.num_samples is None else self.num_samples

    def order(self, epoch: int) -> Tensor:
        weights = self.weights.to(torch.float64)
        if self.replacement:
            sums = weights.cumsum(0)
            draws = uniform(self.seed, epoch, torch.arange(len(self))) * sums[-1]
            return torch.searchsorted(sums, draws, right=True)
        # The first arrivals of independent Poisson processes with these rates (Efraimidis and Spirakis 2006).
        arrivals = -(1 - uniform(self.seed, epoch, torch.arange(len(weights)))).log() / weights
        return arrivals.argsort(stable=True)[: len(self)]
