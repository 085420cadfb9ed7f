"""Parameters that a script writes by itself, where servers hold the weights: the next answer would undo it."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.errors import UsageError

__all__ = ["ParameterWrites", "digests_of"]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


@torch.no_grad()
def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of every tensor the sum of its elements' bits, as whole numbers: the same in any order of adding.

    >>> digests_of({"a": torch.tensor([1.0, 0.0])}) == digests_of({"a": torch.tensor([1.0, 0.5])})
    False
    """
    sums = [_as_words(tensor).sum() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist() if sums else (), strict=True))


def _as_words(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().view(WORDS[plain.element_size()])


@final
class ParameterWrites:
    """Notices them by the contents: a version does not count what is written through `.data`, and counts a swap of
    averaged weights for an evaluation, and back, which changes nothing."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._noted = digests_of(parameters)

    def note(self) -> None:
        """The contents of now are there by right."""
        self._noted = digests_of(self._parameters)

    def check(self) -> None:
        """Raises:
        UsageError: something else is there than was noted.
        """
        found = digests_of(self._parameters)
        written = next((name for name, digest in found.items() if digest != self._noted[name]), None)
        if written is not None:
            raise UsageError(
                f"parameter was written by the script ({written}), and servers hold the weights, which would come back "
                "without it; use a plan whose ranks hold them: topology=native"
            )
