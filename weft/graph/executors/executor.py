"""The executor seam: `(state, batch, on_gradient) -> (outputs, state)`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.specs import CPU, Batch

__all__ = ["AbstractExecutor", "GradientSink", "Loss", "Outputs", "State"]

Loss = Callable[..., Tensor]
"""`loss(predictions, *targets)`: the mean over the samples of a batch, as a scalar."""

GradientSink = Callable[[str, Tensor | None], None]
"""Takes a parameter's name and its gradient, or None for a parameter that had no part in the loss.

The tensor belongs to the sink: the executor keeps no reference and never writes to it again.
"""


@dataclass(frozen=True)
class State:
    """Everything a step reads and writes, by name. A state given to an executor is consumed: use the one it returns."""

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    random: Tensor  # of the generators that dropout and its like draw from; see random_state.py

    @property
    def device(self) -> torch.device:
        """Where the parameters are; a model without any is on the CPU."""
        return next((parameter.device for parameter in self.parameters.values()), CPU)


@dataclass(frozen=True)
class Outputs:
    """The results of a step, apart from gradients: detached from the autograd graph."""

    loss: Tensor
    predictions: Tensor


class AbstractExecutor(ABC):
    """Computes a loss and its gradients.

    The sink is where overlap, early update, compression and every consistency scheme attach, so the contract is
    strict: `on_gradient` is called exactly once for each parameter that requires a gradient, as soon as that gradient
    is complete, while the rest of backward still has to run.
    """

    @abstractmethod
    def initial_state(self) -> State:
        """The state that the model was built with."""

    @abstractmethod
    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        """One forward and backward pass in training mode.

        Args:
            state: consumed; its tensors may be written over.
            on_gradient: called once for each trainable parameter, by name, as soon as its gradient is complete.

        Returns:
            Loss and predictions, and the new state: buffers and random state moved on, parameters as they were.
        """

    @abstractmethod
    def infer(self, state: State, batch: Batch) -> Outputs:
        """A forward pass in evaluation mode: no gradient, no change of state."""

    @abstractmethod
    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        """The first tensor of a step, in the order a step touches them, that is not finite; None if all are."""

    def measured(self) -> Mapping[str, float]:
        """Of the training steps so far, by metric: for an executor that waits for others."""
        return {}
