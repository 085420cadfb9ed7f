"""Some numbers are sent, and the others wait: top-k, a threshold, random-k, deep gradient compression.

a = kept + w g;   sent_i = a_i of the places that are chosen, else 0;   kept = a - sent
"""

import math
from abc import abstractmethod
from typing import final

import numpy as np
import torch
from torch import Tensor

from weft.proving.compression.draws import bits_at, key_of, uniform_at
from weft.proving.compression.messages import Message
from weft.proving.compression.sender import AbstractSender

__all__ = ["DgcSender", "RandomkSender", "ThresholdSender", "TopkSender"]

SAMPLE = 2**14
FIRST_RATIO = 0.25


class AbstractSelection(AbstractSender):
    """Leaves open which numbers are sent."""

    @abstractmethod
    def choose(self, message: Message, waiting: Tensor) -> Tensor:
        """A mask of those that are sent, of all that wait."""

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        waiting = self.memory("residual", message, values)
        waiting.copy_(waiting + values * weight)
        return self.split(waiting, self.choose(message, waiting))

    @staticmethod
    def split(waiting: Tensor, mask: Tensor) -> Tensor:
        sent = torch.where(mask, waiting, 0.0)
        waiting.copy_(torch.where(mask, 0.0, waiting))
        return sent


@final
class TopkSender(AbstractSelection):
    """The ratio n largest; or all that reach the size which as many of a sample reach."""

    def choose(self, message: Message, waiting: Tensor) -> Tensor:
        count, number = _count(float(self.choice["ratio"]), len(waiting)), self.next_number(message)
        if self.choice["select"] == "exact":
            return _largest(waiting, count)
        places = _sample(len(waiting), key_of(message, number, self.rank))
        of_sample = min(max(round(count * len(places) / len(waiting)), 1), len(places))
        bound = waiting[places].abs().sort(descending=True).values[of_sample - 1]
        return waiting.abs() >= bound.clamp(min=torch.finfo(waiting.dtype).tiny)


@final
class ThresholdSender(AbstractSelection):
    """All that reach a size."""

    def choose(self, message: Message, waiting: Tensor) -> Tensor:
        return waiting.abs() >= torch.tensor(float(self.choice["value"]), dtype=waiting.dtype)


@final
class RandomkSender(AbstractSelection):
    """One place of each of k equal parts, the same on all ranks."""

    def choose(self, message: Message, waiting: Tensor) -> Tensor:
        size = len(waiting)
        count = _count(float(self.choice["ratio"]), size)
        draws = uniform_at(key_of(message, self.next_number(message), 0), count).astype(np.float64)
        bounds = np.floor(np.arange(count + 1) * float(size) / count)
        places = bounds[:-1] + np.floor(draws * np.diff(bounds))
        mask = torch.zeros(size, dtype=torch.bool)
        mask[torch.from_numpy(places.astype(np.int64))] = True
        return mask


@final
class DgcSender(AbstractSelection):
    """Velocities wait in place of gradients: u = m u + g, v = v + u; both are 0 where v was sent.

    Nesterov: u = m (u + g), v = v + u + g. The ratio falls from a quarter to its own by one factor in every step of the
    warm-up; weighted gradients are clipped to a norm of c / sqrt(N).
    """

    def choose(self, message: Message, waiting: Tensor) -> Tensor:
        ratio, warmup = float(self.choice["ratio"]), int(self.choice["warmup"])
        number = self.next_number(message)
        if number < warmup and ratio < FIRST_RATIO:
            ratio = FIRST_RATIO * (ratio / FIRST_RATIO) ** (number / warmup)
        return _largest(waiting, _count(ratio, len(waiting)))

    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        waiting, velocity = (self.memory(use, message, values) for use in ("residual", "velocity"))
        gradient, momentum = values * (weight * self._clipping(values, weight)), self.setting.momentum
        if self.setting.is_nesterov:
            velocity.copy_((velocity + gradient) * momentum)
            waiting.copy_(waiting + (velocity + gradient))
        else:
            velocity.copy_(velocity * momentum + gradient)
            waiting.copy_(waiting + velocity)
        mask = self.choose(message, waiting)
        velocity.copy_(torch.where(mask, 0.0, velocity))
        return self.split(waiting, mask)

    def _clipping(self, values: Tensor, weight: float) -> float:
        norm, clip = weight * math.sqrt(float(values.double().square().sum())), float(self.choice["clip"])
        return min(1.0, clip * math.sqrt(weight) / norm) if clip and norm else 1.0


def _count(ratio: float, size: int) -> int:
    return min(size, max(1, math.ceil(ratio * size)))


def _largest(waiting: Tensor, count: int) -> Tensor:
    """Of equals, the first."""
    order = waiting.abs().sort(descending=True, stable=True).indices
    mask = torch.zeros(len(waiting), dtype=torch.bool)
    mask[order[:count]] = True
    return mask


def _sample(size: int, key: int) -> Tensor:
    """All places, or one of each of so many equal parts."""
    if size <= SAMPLE:
        return torch.arange(size)
    inside = bits_at(key, SAMPLE) * np.uint64(size) // np.uint64(2**32)
    return torch.from_numpy(((np.arange(SAMPLE) * size + inside.astype(np.int64)) // SAMPLE).astype(np.int64))
