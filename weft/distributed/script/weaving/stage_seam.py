"""The stages seam: what a weaving needs of a model that is cut into stages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

__all__ = ["AbstractStages"]


class AbstractStages(ABC):
    """This rank's stage of a script's model. All ranks call every method, in the same order."""

    @abstractmethod
    def forward_backward(
        self, loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> Tensor:
        """Gradients are added to those that are there, as backward does; the mean loss of this replica's share."""

    @abstractmethod
    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The model's output, without gradients, in its own mode; on every rank of the replica."""

    @abstractmethod
    def gather(self) -> None:
        """Bring the layers of all stages to every rank."""

    @abstractmethod
    def use_slots(self) -> AbstractContextManager[None]:
        """While it is held, optimizers have the state of the parameters of all stages, for a checkpoint."""

    @abstractmethod
    def begin_again(self) -> None:
        """Go on with rank 0's whole model."""
