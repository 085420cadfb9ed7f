"""The rounding of codecs, from its definition: what proofs hold the codecs to.

A number x = m 2^e, 1/2 <= |m| < 1, is kept to p binary digits: the nearest multiple of 2^(e - p), of two that are
equally near the even one; numbers below the smallest normal one are multiples of the smallest of all.

            p    smallest of all
    bf16    8        2^-133
    fp16   11        2^-24
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.specs import CPU, Plan
from weft.specs.loading import load
from weft.specs.plan import value_of

__all__ = ["BF16", "EXACT", "FP16", "Rounding", "hop_error", "round_all", "rounding_of"]


@dataclass(frozen=True)
class Rounding:
    """To so many binary digits, and to multiples of 2^least; without digits none.

    >>> Rounding(8, -133)(torch.tensor([1.0, 257.0, 259.0]))
    tensor([  1., 256., 260.])
    """

    digits: int | None = None
    least: int = 0

    @property
    def is_exact(self) -> bool:
        return self.digits is None

    def __call__(self, tensor: Tensor) -> Tensor:
        """In float64, which holds every step exactly."""
        if self.digits is None:
            return tensor
        exact = tensor.detach().float().double()
        unit = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact).exponent - self.digits).clamp(min=self.least))
        return (torch.round(exact / unit) * unit).to(tensor.dtype)


EXACT = Rounding()
BF16 = Rounding(8, -133)
FP16 = Rounding(11, -24)


def rounding_of(plan: Plan) -> Rounding:
    """That of what a plan sends, as the table of axes names it."""
    found: Rounding = load(value_of("compress", plan.compress).equations[plan.channel])
    return found


def round_all(rounding: Rounding, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: rounding(tensor).clone() for name, tensor in tensors.items()}


def hop_error(plan: Plan, device: torch.device = CPU) -> float:
    """How far weights and optimizer state may be off, as a share of the largest value, where sums are rounded once for
    every rank: half a unit each, twice that in a square (second moments), and twice that again for later steps, which
    begin where the earlier ones were off."""
    digits = rounding_of(plan).digits
    is_once = device.type == "cpu" and value_of("topology", plan.topology).rounds_once
    # Over shards and then between their groups; of layers that replicas split, before anything is sent, and not at all.
    in_turns = (plan.shard > 1 and plan.data > 1) or plan.expert > 1 or plan.linear > 1
    if digits is None or (is_once and not in_turns):
        return 0.0
    return 4 * plan.num_ranks * 2.0**-digits
