"""The common part of sharded placements: pieces of what the placement inside of it leaves to this rank."""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import Piece
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.whole import gather_whole
from weft.specs.mesh import Axis
from weft.training.checkpoint import Cut, whole_cut
from weft.training.placement import AbstractPlacement
from weft.training.weighting import Weighting

__all__ = ["AbstractShards"]


class AbstractShards(AbstractPlacement):
    """Leaves to a level of sharding which entries lie in pieces, and how pieces and wholes come together.

    Args:
        group: the ranks that hold pieces of the same tensors.
        inner: the placement whose tensors are cut.
        holders: the ranks that together hold every part of the model; by default the group.
    """

    def __init__(self, group: AbstractGroup, inner: AbstractPlacement, holders: AbstractGroup | None = None) -> None:
        self._group = group
        self._inner = inner
        self._holders = holders or group
        self._shapes: dict[str, torch.Size] = {}  # of the tensors that are cut, by name
        self._trained: list[str] = []
        self._pieces: dict[str, Piece] = {}  # this rank's

    @abstractmethod
    def lies_in_pieces(self, kind: str) -> bool:
        """Of the entries of a checkpoint of this kind (`parameter`, `slot`)."""

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:
        self._inner.look_at(inputs)

    @property
    def has_loss(self) -> bool:
        return self._inner.has_loss

    @property
    def inner(self) -> AbstractPlacement:
        return self._inner

    @property
    def weighting(self) -> Weighting | None:
        return self._inner.weighting

    @property
    def activation_bytes(self) -> int:
        return self._inner.activation_bytes

    @property
    def takes_forwards_together(self) -> bool:
        return self._inner.takes_forwards_together

    def use_whole(self) -> AbstractContextManager[None]:
        return self._inner.use_whole()

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        return self._inner.reduced_over(name)

    @final
    def note_pieces(self, parameters: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
        """The tensors that are cut, and what this rank has of them."""
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._pieces = dict(pieces)

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        return self._inner.norm(self.add_up(norms))

    def whole_norms(self, norms: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.whole_norms(self.add_up(norms, num_each=2))

    @final
    def add_up(self, norms: Mapping[str, Tensor], num_each: int = 1) -> dict[str, Tensor]:
        """From norms of this rank's pieces to those of the tensors that were cut, of all that are trained. One call for
        all of them.

        In host memory, where a rank without a piece has its zero: a group may carry each device in another way.
        """
        squares = torch.zeros(len(self._trained), num_each, dtype=torch.float64)
        like = next(iter(norms.values()), squares)
        for row, name in zip(squares, self._trained, strict=True):
            if name in norms:
                row.copy_(norms[name]).square_()
        self._group.all_reduce(squares)
        found = squares.sqrt_().to(like).view(-1, *((num_each,) if num_each > 1 else ()))
        return dict(zip(self._trained, found.unbind(), strict=True))

    def cut_of(self, name: str) -> Cut | None:
        """A piece that is the whole of a tensor is no part of it."""
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0] if kind == "slot" else rest
        inner = self._inner.cut_of(name)
        shape = self._shapes.get(owner)
        if shape is None or not self.lies_in_pieces(kind):
            return inner
        piece = self._pieces.get(owner)
        if piece is not None and (piece.begin, piece.end) == (0, shape.numel()):
            return inner
        return (inner or whole_cut(shape)).piece(*((piece.begin, piece.end) if piece else (0, 0)))

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gather_whole(self._holders, self.cut_of, tensors)
