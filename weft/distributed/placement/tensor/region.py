"""Where a forward stands: between a layer that gave parts and the one that takes them, or outside of such a region.

x ---> [column] ---- parts: activation, dropout, attention ---- [row] ---> y
        opens        masks of the whole are drawn, and the      closes
                     part of them taken that is this rank's
"""

import weakref
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.codecs.activations import AbstractWireFormat, CodedGroup, ExactFormat
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import collect, copy, span_of

__all__ = ["Kind", "Region"]

Kind = Literal["features", "heads", "channels", "sequence"]


@final
class Region:
    """Of one model on one rank.

    Args:
        group: the ranks that have the other parts.
        wire_format: in which activations and their gradients travel between them.
    """

    def __init__(self, group: AbstractGroup, wire_format: AbstractWireFormat | None = None) -> None:
        self.group = CodedGroup(group, wire_format or ExactFormat())
        self.exact = group  # for what is small, and for predictions
        self.kind: Kind | None = None
        self.outside: Kind | None = None  # "sequence" where layers outside of regions have parts of it
        self.size = 0  # of the dim that is split, in the whole
        self._length = 0  # of sequences, in the whole
        self.may_give_parts = False  # of logits, to a loss that takes them so
        self.gives_parts = False  # in the forward that runs
        self.gave_parts = False
        self.num_words = 0  # of logits that were given in parts, in the whole
        self._shared: tuple[weakref.ref[Tensor], Tensor, bool] | None = None

    def open(self, kind: Kind, size: int) -> None:
        self.kind, self.size = kind, size

    def close(self) -> None:
        self.kind, self._shared = self.outside, None
        if self.outside == "sequence":
            self.size = self._length

    def enter_sequence(self, length: int) -> None:
        """Layers outside of regions take parts of sequences that are so long."""
        self.outside, self._length = "sequence", length
        self.close()

    def leave_sequence(self) -> None:
        self.outside = None
        self.close()

    def begin(self, *, is_training: bool) -> None:
        """A forward of the whole model."""
        self.reset()
        self.gives_parts, self.gave_parts = self.may_give_parts and is_training, False

    def reset(self) -> None:
        self.kind, self.outside, self._shared = None, None, None

    def copy_once(self, x: Tensor) -> Tensor:
        """The copy of an input that several layers take, whose gradients are then added up in one message; put together
        from all ranks, where each has a part of a sequence."""
        is_recorded = torch.is_grad_enabled()
        if self._shared is not None and self._shared[0]() is x and self._shared[2] == is_recorded:
            return self._shared[1]
        is_part = self.outside == "sequence"
        copied = collect(x, self.group, 1, self._length) if is_part else copy(x, self.group)
        self._shared = weakref.ref(x), copied, is_recorded
        return copied

    def dim_of(self, x: Tensor) -> int:
        """The dim of an activation that is split here."""
        if self.kind == "channels" or self.kind == "sequence" or (self.kind == "heads" and x.dim() == 4):
            return 1
        return x.dim() - 1

    def span(self, length: int) -> tuple[int, int]:
        """Of a dim that is so long here: where this rank's part begins, and the length of the whole."""
        begin, own = span_of(self.size, self.group.rank, self.group.size)
        if own == length:
            return begin, self.size
        return self.group.rank * length, self.group.size * length  # heads, and what was made from equal parts
