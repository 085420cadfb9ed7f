"""Gradients for a shard that is not reached in every step."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

__all__ = ["Held"]


@final
class Held:
    """What is added up until the shard's turn: gradients, each times its share of its batch.

    What is pushed is the sum over the mean share, with the mean share: so every gradient counts with its own share, and
    as many as were added.
    """

    def __init__(self) -> None:
        self._shares: list[float] = []
        self._totals: list[Tensor | None] = []

    def add(self, share: float, tensors: Sequence[Tensor | None]) -> None:
        terms = [None if tensor is None else tensor * share for tensor in tensors]  # the next step may reuse the memory
        before = self._totals or [None] * len(terms)
        self._totals = [t if b is None else b if t is None else b + t for b, t in zip(before, terms, strict=True)]
        self._shares.append(share)

    def take(self) -> tuple[float, list[Tensor | None]]:
        """The share to push with, and the tensors; nothing is held any more.

        >>> import torch
        >>> held = Held()
        >>> held.add(0.75, [torch.tensor([1.0]), None])
        >>> held.add(0.25, [torch.tensor([3.0]), None])
        >>> held.take()
        (0.5, [tensor([3.]), None])
        """
        mean = sum(self._shares) / len(self._shares)
        totals, self._shares, self._totals = self._totals, [], []
        return mean, [None if total is None or not mean else total / mean for total in totals]
