"""A compression, as one sees it who sees all ranks at once: the sum that all receive of what each has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from weft.proving.compression.messages import Message
from weft.proving.compression.sender import AbstractSender, Setting

__all__ = ["AbstractCompression", "OfSenders"]


class AbstractCompression(ABC):
    """With the memory of all ranks."""

    @property
    def tolerance(self) -> float:
        """How far ranks may be off, as a share of a tensor's largest value; 0 where the definition tells every bit."""
        return 0.0

    @abstractmethod
    def add_up(self, message: Message, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """The sum that all ranks receive, of the values of each, flat, times its weight."""


@final
class OfSenders(AbstractCompression):
    """Ranks that send without asking the others; the sum is made in their order.

    Args:
        make: a rank, from the setting and its number.
    """

    def __init__(self, setting: Setting, make: Callable[[Setting, int], AbstractSender]) -> None:
        self.senders = [make(setting, rank) for rank in range(setting.num_ranks)]
        self._group_size = setting.group_size

    def add_up(self, message: Message, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        rows = zip(self.senders, values, weights, strict=True)
        sent = [sender.send(message, own, weight) for sender, own, weight in rows]
        groups = [sent[first : first + self._group_size] for first in range(0, len(sent), self._group_size)]
        sums = [sum(group[1:], group[0]) for group in groups]
        return self.senders[0].end(sum(sums[1:], sums[0]))
