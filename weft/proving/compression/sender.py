"""One rank of a compression: the numbers that others decode of what it sends, and what it keeps for later."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.proving.compression.messages import Message
from weft.specs.plan import Choice

__all__ = ["AbstractSender", "Setting"]


@dataclass(frozen=True)
class Setting:
    """A compression of a plan, for ranks of a recipe.

    Args:
        group_size: ranks whose sum is made first, where the sums of groups are added up then.
        momentum: of the optimizer, of a compression that takes it.
    """

    choice: Choice
    num_ranks: int
    group_size: int
    momentum: float = 0.0
    is_nesterov: bool = False


class AbstractSender(ABC):
    """Everything that it remembers is of one message: numbers that wait, and how many messages there were."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting = setting
        self.choice = setting.choice
        self.rank = rank
        self._memories: dict[tuple[str, Message], Tensor] = {}
        self._numbers: dict[Message, int] = {}

    @abstractmethod
    def send(self, message: Message, values: Tensor, weight: float) -> Tensor:
        """Decoded: what all ranks make of `weight` times these values, flat float32 or float64."""

    def end(self, total: Tensor) -> Tensor:
        """The sum of what all ranks sent, as they receive it."""
        return total

    def memory(self, use: str, message: Message, values: Tensor) -> Tensor:
        """Zeros at first; changed in place."""
        return self._memories.setdefault((use, message), torch.zeros_like(values))

    def next_number(self, message: Message) -> int:
        number = self._numbers.get(message, 0)
        self._numbers[message] = number + 1
        return number
