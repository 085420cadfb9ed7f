"""The wire format seam: in which form activations and their gradients travel between the ranks that hold a model.

    none       as they are                          fp16, bf16     rounded to 16 bits, ties to even
    linear8    a byte each, and scales              tree8          the same, of another type (tables.py)

Numbers are encoded where they are sent and decoded where they arrive; nothing is kept. Whole numbers, truth values and
small tensors (`LEAST`) travel as they are. NaN and infinity stay what they are in 16 bits, in 8 bits both become NaN; a
number beyond 65504 becomes an infinity in fp16. So what is not finite is still seen.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.activations import eight_bit
from weft.distributed.codecs.activations.tables import EightBitType, linear_type, tree_type
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of

__all__ = [
    "LEAST",
    "AbstractWireFormat",
    "EightBitFormat",
    "ExactFormat",
    "HalfFormat",
    "empty_message",
    "make_format",
    "pack",
    "unpack",
]

LEAST = 256
"""Elements of a tensor below which there is nothing to gain: a message costs more than its bytes."""


class AbstractWireFormat(ABC):
    """Stateless: the same tensor always becomes the same message."""

    @property
    @abstractmethod
    def is_summable(self) -> bool:
        """Whether a group can add up messages."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype | None:
        """Of messages; None where they are the tensors themselves."""

    @abstractmethod
    def length(self, num_elements: int) -> int:
        """Elements of the message of so many numbers."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:
        """A flat message, in memory of its own."""

    @abstractmethod
    def decode(self, message: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The numbers of a message, flat, in the type that they had."""

    @final
    def takes(self, num_elements: int, dtype: torch.dtype) -> bool:
        """Whether a tensor of this size and type is encoded: the same answer on all ranks."""
        if self.dtype is None or not dtype.is_floating_point or num_elements < LEAST:
            return False
        return self.length(num_elements) * self.dtype.itemsize < num_elements * dtype.itemsize


@final
class ExactFormat(AbstractWireFormat):
    """`activations=none`."""

    @property
    def is_summable(self) -> bool:
        return True

    @property
    def dtype(self) -> None:
        return None

    def length(self, num_elements: int) -> int:
        return num_elements

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).clone()

    def decode(self, message: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        return message


@final
class HalfFormat(AbstractWireFormat):
    """`activations=fp16` and `activations=bf16`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @property
    def is_summable(self) -> bool:
        return True

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def length(self, num_elements: int) -> int:
        return num_elements

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(-1).to(self._dtype, copy=True)

    def decode(self, message: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        return message.to(dtype)


@final
class EightBitFormat(AbstractWireFormat):
    """`activations=linear8` and `activations=tree8`."""

    def __init__(self, kind: EightBitType) -> None:
        self._kind = kind

    @property
    def is_summable(self) -> bool:
        return False

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def length(self, num_elements: int) -> int:
        return eight_bit.message_length(num_elements)

    def encode(self, tensor: Tensor) -> Tensor:
        return eight_bit.encode(tensor, self._kind)

    def decode(self, message: Tensor, num_elements: int, dtype: torch.dtype) -> Tensor:
        return eight_bit.decode(message, num_elements, self._kind).to(dtype)


def pack(wire_format: AbstractWireFormat, tensor: Tensor) -> Tensor:
    """The message of one tensor; the tensor itself, if it travels as it is."""
    if wire_format.takes(tensor.numel(), tensor.dtype):
        return wire_format.encode(tensor)
    return tensor.detach().contiguous()


def empty_message(
    wire_format: AbstractWireFormat, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory to receive the message of a tensor.

    Args:
        wire_format: in which it travels.
        shape: of the tensor.
        dtype: of the tensor.
        device: of the memory.
    """
    num_elements = torch.Size(shape).numel()
    if wire_format.takes(num_elements, dtype):
        return torch.empty(wire_format.length(num_elements), dtype=wire_format.dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def unpack(wire_format: AbstractWireFormat, message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of a message that `pack` made.

    Args:
        wire_format: in which it travelled.
        message: as it was received.
        shape: of the tensor.
        dtype: of the tensor.
    """
    num_elements = torch.Size(shape).numel()
    if wire_format.takes(num_elements, dtype):
        return wire_format.decode(message, num_elements, dtype).view(shape)
    return message


# Rows of the axis `activations`: functions of a choice.


def make_format(choice: Choice) -> AbstractWireFormat:
    """The wire format of a plan's activations."""
    found: AbstractWireFormat = load(value_of("activations", choice).realised_by["all_reduce"])(choice)
    return found


def make_exact(choice: Choice) -> AbstractWireFormat:
    return ExactFormat()


def make_fp16(choice: Choice) -> AbstractWireFormat:
    return HalfFormat(torch.float16)


def make_bf16(choice: Choice) -> AbstractWireFormat:
    return HalfFormat(torch.bfloat16)


def make_linear8(choice: Choice) -> AbstractWireFormat:
    return EightBitFormat(linear_type())


def make_tree8(choice: Choice) -> AbstractWireFormat:
    return EightBitFormat(tree_type())
