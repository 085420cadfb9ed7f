"""The two 8-bit types of Dettmers ("8-Bit Approximations for Parallelism in Deep Learning", 2015), as tables.

    linear     s iiiiiii            i / 127, with sign s                           (two's complement)
    tree       s 1 ffffff           0.1  ... 1        64 values     e zeros, a one that ends them, and the fraction
               s 0 1 fffff          0.01 ... 0.1      32            in the bits that are left:
               s 0 0 1 ffff         ...               16
               ...                                                  (0.1 + 0.9 f) 10^-e
               s 0 0 0 0 0 0 1      1e-7               1
               0 0 0 0 0 0 0 0      0                  1

Values lie between -1 and 1, and are multiplied by the largest magnitude of their block. A number becomes the nearest
value, of two that are equally near the smaller one (linear: the even one). Both types have one code to spare,
1 0000000: it stands for what is not a finite number.

The tree's nearest value is found by the first 16 bits of a float, below which at most one more threshold lies:

    magnitude x     0 01111110 0110011 | 0110...      first[these bits] thresholds are below; one more if x > threshold
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

__all__ = ["NOT_FINITE", "EightBitType", "linear_type", "tree_type"]

NOT_FINITE = 0x80
"""The code of NaN and infinity, in both types."""

_SHIFT, _ONE = 16, 0x3F80  # bits of a float32 that are left out, and those of 1.0 without them


@dataclass(frozen=True, eq=False)
class EightBitType:
    """An 8-bit type: the values of its codes, and for `tree` how the nearest is found.

    Args:
        magnitudes: of the codes 0 to 127, in float64.
    """

    name: Literal["linear", "tree"]
    magnitudes: tuple[float, ...]

    @cached_property
    def values(self) -> Tensor:
        """Of all 256 codes."""
        positive = torch.tensor(self.magnitudes, dtype=torch.float64)
        ones = positive[1:]
        negative = -ones.flip(0) if self.name == "linear" else -ones  # two's complement begins with -127
        return torch.cat([positive, torch.tensor([torch.nan], dtype=torch.float64), negative]).float()

    @cached_property
    def thresholds(self) -> Tensor:
        """Between magnitudes in their order, each half-way from one to the next; beyond the last is none."""
        ordered = torch.tensor(sorted(self.magnitudes), dtype=torch.float64)
        middles = (ordered[1:] + ordered[:-1]) / 2
        return torch.cat([middles, torch.tensor([torch.inf], dtype=torch.float64)]).float()

    @cached_property
    def first(self) -> Tensor:
        """By the first bits of a magnitude: how many thresholds are below all numbers that begin with them."""
        begins = (torch.arange(_ONE + 1, dtype=torch.int32) << _SHIFT).view(torch.float32)
        return torch.searchsorted(self.thresholds, begins, out_int32=True)

    @cached_property
    def codes(self) -> Tensor:
        """By the place of a magnitude in their order: its code."""
        return torch.tensor(self.magnitudes, dtype=torch.float64).argsort().to(torch.uint8)


@cache
def linear_type() -> EightBitType:
    return EightBitType("linear", tuple(i / 127 for i in range(128)))


@cache
def tree_type() -> EightBitType:
    return EightBitType("tree", tuple(map(_tree_magnitude, range(128))))


def _tree_magnitude(code: int) -> float:
    """
    >>> [round(_tree_magnitude(code), 4) for code in (0, 0b1000000, 0b1111111, 0b0110000)]
    [0.0, 0.1, 1.0, 0.055]
    """
    if code == 0:
        return 0.0
    num_bits = code.bit_length() - 1  # of the fraction
    exponent = 6 - num_bits
    fraction = code - (1 << num_bits)
    steps = (1 << num_bits) - (exponent == 0)  # the largest of all is 1; below, a decade ends where the next begins
    return float((0.1 + 0.9 * fraction / steps) * 10.0**-exponent)
