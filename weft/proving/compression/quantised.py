"""Rounding by chance: QSGD, TernGrad, and floats of 16 bits.

x is between two numbers a <= x <= b that can be sent, and becomes b with a chance of (x - a) / (b - a).
"""

import math
from typing import Protocol, final

import torch
from torch import Tensor

from weft.proving.compression.draws import derive, key_of, uniform_at
from weft.proving.compression.messages import Message
from weft.proving.compression.sender import AbstractSender, Setting

__all__ = ["Digits", "HalfSender", "QsgdSender", "TernGradSender"]


class Digits(Protocol):
    """Rounding to so many binary digits."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """The nearest of so many digits."""

    def below(self, exact: Tensor) -> Tensor:
        """The largest of so many digits that is no larger, of float64."""


@final
class QsgdSender(AbstractSender):
    """Levels 0 to s = 2^(bits - 1) - 1 of the norm of each block; the sign beside them."""

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        scaled, block = values * weight, int(self.choice["block"])
        draws = torch.from_numpy(uniform_at(key_of(message, self.next_number(message), self.rank), len(values)))
        levels = 2 ** (int(self.choice["bits"]) - 1) - 1
        parts = [
            _round_to_levels(part, _norm(part, str(self.choice["norm"])), levels, own)
            for part, own in zip(scaled.split(block), draws.split(block), strict=True)
        ]
        return torch.cat(parts)


@final
class TernGradSender(AbstractSender):
    """-s, 0 and s of each tensor, s its largest number after clipping at so many deviations from zero."""

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        key, clip = key_of(message, self.next_number(message), self.rank), float(self.choice["clip"])
        found = []
        for index, part in enumerate((values * weight).split(message.sizes)):
            if clip:
                limit = clip * math.sqrt(float(part.double().square().mean()))
                part = part.clamp(-limit, limit)
            draws = torch.from_numpy(uniform_at(derive(key, index), len(part)))
            found.append(_round_to_levels(part, _norm(part, "max"), 1, draws))
        return torch.cat(found)


@final
class HalfSender(AbstractSender):
    """Numbers of 16 bits; their sum is rounded again, to the nearest.

    Args:
        rounding: to the nearest.
    """

    def __init__(self, setting: Setting, rank: int, rounding: Digits) -> None:
        super().__init__(setting, rank)
        self._rounding = rounding

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        exact = (values * weight).float().double()
        below = self._rounding.below(exact)
        above = -self._rounding.below(-exact)
        draws = torch.from_numpy(uniform_at(key_of(message, self.next_number(message), self.rank), len(values)))
        # The draw that moves a number is below the distance from the nearest, so both ends count it from there.
        nearest = self._rounding(exact)
        other = torch.where(nearest == below, above, below)
        moves = draws.double() * (above - below) < (exact - nearest).abs()
        return torch.where(moves, other, nearest).to(values.dtype)

    def end(self, total: Tensor) -> Tensor:
        return self._rounding(total)


def _norm(part: Tensor, kind: str) -> Tensor:
    """In float32."""
    return part.double().square().sum().sqrt().float() if kind == "l2" else part.abs().max().float()


def _round_to_levels(part: Tensor, norm: Tensor, levels: int, draws: Tensor) -> Tensor:
    """sgn(x) norm / s times the level below s |x| / norm, or the one above; products are those of float32."""
    top = torch.tensor(float(levels))
    if not bool((top / norm).isfinite()):  # nothing is in the block, or hardly anything
        return torch.zeros_like(part)
    reached = (part.float().abs() * (top / norm)).clamp(max=top)
    level = (reached + draws).floor().clamp(max=top)
    return (part.float().sign() * level * (norm / top)).to(part.dtype)
