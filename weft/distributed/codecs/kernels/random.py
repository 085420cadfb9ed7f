"""Random numbers of a counter and a key: the same in torch and in C++, in any order, with no state to keep.

    key (64 bits)    high word ------------------------+
                     low word ---+                     |
                                 v                     v
    counter (32 bits) ---------> ^ -> >>, * , >> ----> ^ -> *, >> ----> upper 24 bits / 2^24

A 32-bit finaliser of two multiplications ("lowbias32" of C. Wellons, whose bias was searched for the least), with the
key's words in front of each. Keys have to be hashes: `derive_key` makes them.
"""

import torch
from torch import Tensor

from weft.training.datasets.draws import draws

__all__ = ["derive_key", "mix", "split_key", "uniform"]

MASK = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B


def derive_key(*numbers: int) -> int:
    """A 64-bit key from numbers such as seed, rank, step and the index of a tensor; their order counts.

    >>> derive_key(1, 2) != derive_key(2, 1)
    True
    """
    return int(draws(*numbers)[0])


def split_key(key: int) -> tuple[int, int]:
    """The low and the high word of a key."""
    assert 0 <= key < 2**64, key
    return key & MASK, key >> 32


def mix(counter: Tensor, key: int) -> Tensor:
    """32 random bits, as int64, for each counter (int64, at least 0 and below 2^32)."""
    low, high = split_key(key)
    state = counter ^ low
    state = state ^ (state >> 16)
    state = (state * FIRST) & MASK  # int64 wraps; the low word is right all the same
    state = state ^ (state >> 15) ^ high
    state = (state * SECOND) & MASK
    return state ^ (state >> 16)


def uniform(key: int, num: int, device: torch.device | str = "cpu") -> Tensor:
    """Float32 numbers in [0, 1), multiples of 2^-24: element i is that of counter i.

    >>> bool(uniform(derive_key(7), 10)[:4].equal(uniform(derive_key(7), 4)))
    True
    """
    return (mix(torch.arange(num, device=device), key) >> 8).to(torch.float32) * 2.0**-24
