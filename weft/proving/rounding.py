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

from weft.errors import UsageError
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
        unit = self._unit(exact)
        return (torch.round(exact / unit) * unit).to(tensor.dtype)

    def below(self, exact: Tensor) -> Tensor:
        """The largest of so many digits that is no larger, of float64."""
        unit = self._unit(exact)
        return torch.floor(exact / unit) * unit

    def _unit(self, exact: Tensor) -> Tensor:
        assert self.digits is not None, "there are digits"
        return torch.ldexp(torch.ones_like(exact), (torch.frexp(exact).exponent - self.digits).clamp(min=self.least))


EXACT = Rounding()
BF16 = Rounding(8, -133)
FP16 = Rounding(11, -24)

# Of activations on the wire: the largest error of a number, as a share of the largest in its tensor.
NO_STEP, BF16_STEP, FP16_STEP = 0.0, 2.0**-8, 2.0**-11
LINEAR8_STEP = 1 / 254  # half a step of 127
TREE8_STEP = 0.9 / 63 / 2  # half a step of the 63 in the upper decade


def rounding_of(plan: Plan) -> Rounding:
    """That of what a plan sends, as the table of axes names it.

    Raises:
        UsageError: its compression is no rounding of numbers one by one.
    """
    found = load(value_of("compress", plan.compress).equations[plan.channel])
    if not isinstance(found, Rounding) or plan.compress.get("round", "nearest") != "nearest":
        raise UsageError(
            f"messages of this compression hang on chance, or on what was kept back (plan: {plan}); "
            "prove the plan with compress=bf16"
        )
    return found


def round_all(rounding: Rounding, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: rounding(tensor).clone() for name, tensor in tensors.items()}


def hop_error(plan: Plan, device: torch.device = CPU) -> float:
    """How far weights and optimizer state may be off, as a share of the largest value, where sums are rounded once for
    every rank: half a unit each, twice that in a square (second moments), and twice that again for later steps, which
    begin where the earlier ones were off."""
    found = load(value_of("compress", plan.compress).equations[plan.channel])
    digits = found.digits if isinstance(found, Rounding) else None
    is_once = device.type == "cpu" and value_of("topology", plan.topology).rounds_once
    # Over shards and then between their groups; of layers that replicas split, before anything is sent, and not at all.
    in_turns = (plan.shard > 1 and plan.data > 1) or plan.expert > 1 or plan.linear > 1
    if digits is None or (is_once and not in_turns):
        return 0.0
    return 4 * plan.num_ranks * 2.0**-digits
