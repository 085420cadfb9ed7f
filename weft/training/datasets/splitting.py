"""How one body of samples is cut into training, validation and test parts, the same way every time."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from weft.errors import UsageError
from weft.training.datasets.draws import permutation

__all__ = ["cut", "fixed_order"]

# Independent of the run's seed: repetitions differ in their training, never in what they are judged on.
SPLIT_SEED = 500


def fixed_order(size: int) -> Tensor:
    """The order in which samples are cut where the order of a file may mean something (int64)."""
    return permutation(size, SPLIT_SEED)


def cut(samples: Tensor, shares: Sequence[int]) -> list[Tensor]:
    """Consecutive parts in proportion to `shares`, none empty; the first takes what rounding leaves over.

    >>> import torch
    >>> [len(part) for part in cut(torch.arange(25), (8, 1, 1))]
    [21, 2, 2]
    """
    later = [len(samples) * share // sum(shares) for share in shares[1:]]
    sizes = [len(samples) - sum(later), *later]
    if min(sizes) == 0:
        parts = ":".join(map(str, shares))
        raise UsageError(f"too few samples to cut into parts (samples: {len(samples)}, parts: {parts}); give more data")
    ends = accumulate(sizes)
    return [samples[end - size : end] for size, end in zip(sizes, ends, strict=True)]
