"""One bit for a number: 1-bit SGD, and signs with a scale.

a = kept + w g;   sent_i = a mean of its block;   kept = a - sent
"""

from typing import final

import torch
from torch import Tensor

from weft.proving.compression.messages import Message
from weft.proving.compression.sender import AbstractSender, Setting

__all__ = ["SignSender"]


@final
class SignSender(AbstractSender):
    """`onebit`: the mean of those of a block that are not negative, and that of the others. `sign`: plus or minus the
    mean of all magnitudes.

    Args:
        is_symmetric: of the second.
    """

    def __init__(self, setting: Setting, rank: int, *, is_symmetric: bool) -> None:
        super().__init__(setting, rank)
        self._decode = _one_mean if is_symmetric else _two_means

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        waiting = self.memory("residual", message, values)
        waiting.copy_(waiting + values * weight)
        blocks = [block for part in waiting.split(message.sizes) for block in part.split(int(self.choice["block"]))]
        sent = torch.cat([self._decode(block) for block in blocks])
        waiting.sub_(sent)
        return sent


def _two_means(part: Tensor) -> Tensor:
    is_high = part >= 0
    high, low = (_mean(part.double()[mask]).to(part.dtype) for mask in (is_high, ~is_high))
    return torch.where(is_high, high, low)


def _one_mean(part: Tensor) -> Tensor:
    mean = _mean(part.double().abs()).to(part.dtype)
    return torch.where(part >= 0, mean, -mean)


def _mean(numbers: Tensor) -> Tensor:
    """As it travels, in float32; 0 of none."""
    return numbers.mean().float() if len(numbers) else torch.tensor(0.0)
