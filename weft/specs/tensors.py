"""Tensors, tasks and batches, described or held."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["IGNORED", "Batch", "TaskSpec", "TensorSpec"]

IGNORED = -100
"""A class index that is no target: padding. Losses and metrics leave it out, as PyTorch's do."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor, without its values. In data sets the shape is that of one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class TaskSpec:
    """The input and output of a model: one input sample, and the size of the last output dimension."""

    input: TensorSpec
    num_outputs: int


@dataclass(frozen=True)
class Batch:
    """Samples stacked along dimension 0: the model is called as `model(*inputs)`, the loss as
    `loss(predictions, *targets)`."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def num_targets(self) -> int:
        """The weight of the batch in a mean: its class indices without padding, or else its samples."""
        first = self.targets[0]
        return len(self) if first.is_floating_point() else int((first != IGNORED).sum())

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> "Batch":
        """A copy on another device, or with its floating-point tensors (and only those) in another type."""

        def convert(tensor: Tensor) -> Tensor:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            return tensor.to(device=device, dtype=wanted)

        return Batch(tuple(map(convert, self.inputs)), tuple(map(convert, self.targets)))

    def split(self, num_parts: int, *, keeps_empty: bool = False) -> list["Batch"]:
        """At most `num_parts` consecutive pieces whose sizes differ by at most one sample; none is empty unless those
        are kept."""
        inputs = [tensor.tensor_split(num_parts) for tensor in self.inputs]
        targets = [tensor.tensor_split(num_parts) for tensor in self.targets]
        parts = (Batch(tuple(t[i] for t in inputs), tuple(t[i] for t in targets)) for i in range(num_parts))
        return [part for part in parts if keeps_empty or len(part)]
