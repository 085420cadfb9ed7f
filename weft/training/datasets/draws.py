"""Random numbers without a generator: each is a hash of its key.

A draw depends on its key (a seed, an epoch, a sample's index) and on nothing drawn before it. So every rank can make
the draws it needs and no others, a resume needs no generator state, and a new release of PyTorch or NumPy changes
neither a split nor an order.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["draws", "permutation", "uniform"]

Key = int | Tensor


def draws(*key: Key) -> NDArray[np.uint64]:
    """64 random bits for every key; int64 tensors among the parts broadcast, and give the shape of the result.

    >>> bool(draws(7, torch.arange(3))[1] == draws(7, 1)[0])
    True
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state ^ _as_unsigned(part))
    return state


def uniform(*key: Key) -> Tensor:
    """A float64 in [0, 1) for every key: the upper 53 bits of its draw."""
    return torch.from_numpy((draws(*key) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permutation(size: int, *key: int) -> Tensor:
    """The numbers 0 to size - 1 in the random order that the key names (int64).

    >>> sorted(permutation(5, 1).tolist())
    [0, 1, 2, 3, 4]
    """
    return torch.from_numpy(np.argsort(draws(*key, torch.arange(size)), kind="stable"))


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # One step of SplitMix64 (Steele, Lea and Flood 2014): a bijection in which every input bit flips half the output.
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _as_unsigned(part: Key) -> NDArray[np.uint64]:
    if isinstance(part, Tensor):
        return part.numpy().astype(np.uint64)
    return np.array([part % 2**64], np.uint64)
