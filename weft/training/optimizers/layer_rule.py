"""Rules that scale the update of each tensor by norms of the whole tensor, wherever its pieces are.

on every rank      measure        norms of its pieces of all tensors          |w0|  |d0|  |w1|  |d1| ...
                   whole_norms    one message: norms of whole tensors
                   scale          the update of its pieces
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.training.optimizers.optimizer import AbstractRule, Scope, Shared, Slots

__all__ = ["AbstractLayerRule", "Draft", "norms_here", "trust_ratio"]


@dataclass(frozen=True)
class Draft:
    """An update that waits for norms."""

    direction: Tensor
    slots: Slots


class AbstractLayerRule(AbstractRule):
    """Leaves to the rule in which direction a tensor goes (`draft`), and how far by its norms (`scale`)."""

    @property
    def scope(self) -> Scope:
        return "layer"

    def new_input(self, shared: Shared) -> Shared:
        return replace(shared, step=shared.step + 1)

    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor:
        return parameter

    @abstractmethod
    def draft(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> Draft:
        """Element by element: right for any piece."""

    @abstractmethod
    def scale(self, parameter: Tensor, draft: Draft, norms: Tensor, shared: Shared) -> tuple[Tensor, Slots]:
        """The parameter, or a piece of it, after the update.

        Args:
            norms: of the whole parameter and the whole direction.
        """

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        draft = self.draft(gradient, parameter, slots, shared)
        return self.scale(parameter, draft, norms_here(parameter, draft), shared)


def norms_here(parameter: Tensor, draft: Draft) -> Tensor:
    """Of what is here of a tensor: in float64 where the device has it, so that sums over pieces are as good as one."""
    dtype = torch.float32 if parameter.device.type == "mps" else torch.float64
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in (parameter, draft.direction)])


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Their ratio; 1 where one of them is 0: a tensor that begins at 0 must be able to leave it."""
    is_usable = (numerator > 0) & (denominator > 0)
    return torch.where(is_usable, numerator / denominator, torch.ones_like(numerator))
