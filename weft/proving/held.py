"""The elements of a model that one server holds.

A run of each tensor, or, where ranks hold parts of a model, a run of such a part, wherever its elements lie in the
whole.

    part 0 of w     [ 0  1  2  3 ]  8  9 ...        servers 0 and 1 of part 0 have 0 1 2 and 3 8 9
                    [ 4  5  6  7 ]                  those of part 1 have 4 5 6 and 7 ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from weft.distributed.codecs import Piece
from weft.distributed.placement.cut import cut_evenly
from weft.training.placement import AbstractPlacement

__all__ = ["Elements", "Layout", "elements_of_servers", "layout_of", "pack_layout", "unpack_layout"]

Layout = Mapping[str, Tensor]
"""Of each parameter that the servers of a part are told of, the places of its elements in the whole, by name."""

PREFIX: Final = "held/"


@dataclass(frozen=True, eq=False)
class Elements:
    """Some elements of a tensor, by their places in it; all where there are none given."""

    name: str
    places: Tensor | None = None

    @staticmethod
    def of_piece(piece: Piece, whole: Tensor) -> "Elements":
        return Elements(piece.name, None if piece.is_whole(whole) else torch.arange(piece.begin, piece.end))

    def take(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if self.places is None else tensor.detach().take(self.places.to(tensor.device))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """In place."""
        if self.places is None:
            tensor.detach().copy_(values)
            return
        dense = tensor.detach().contiguous()  # a view, unless its memory is in another order
        dense.view(-1)[self.places.to(tensor.device)] = values.reshape(-1)
        tensor.detach().copy_(dense)


def layout_of(placement: AbstractPlacement, parameters: Mapping[str, Tensor]) -> Layout:
    """Of parameters, or parts of them, as a rank has them."""
    found = {}
    for name, parameter in parameters.items():
        cut = placement.cut_of(f"parameter/{name}")
        shape = tuple(parameter.shape) if cut is None else cut.shape
        places = torch.arange(torch.Size(shape).numel()).view(shape)
        found[name] = (places if cut is None else cut.take(places)).reshape(-1)
    return found


def pack_layout(layout: Layout) -> dict[str, Tensor]:
    """As a trace holds it, by names that keep the order."""
    return {f"{PREFIX}{number:06d}/{name}": places for number, (name, places) in enumerate(layout.items())}


def unpack_layout(trace: Mapping[str, Tensor]) -> tuple[Layout, dict[str, Tensor]]:
    """The layout in a trace, and what else it has."""
    held = {name.removeprefix(PREFIX): found for name, found in sorted(trace.items()) if name.startswith(PREFIX)}
    rest = {name: found for name, found in trace.items() if not name.startswith(PREFIX)}
    return {name.partition("/")[2]: places for name, places in held.items()}, rest


def elements_of_servers(
    parameters: Mapping[str, Tensor], num_shards: int, *, may_cut: bool, layouts: Sequence[Layout] = ()
) -> list[tuple[Elements, ...]]:
    """Of every server, those of the parts one after the other.

    Args:
        parameters: of the whole model, that are trained.
        num_shards: servers of each part.
        may_cut: whether a tensor may be cut into pieces.
        layouts: of the parts; by default one part is all.
    """
    if not layouts:
        cuts = cut_evenly(parameters, num_shards, may_cut=may_cut)
        return [tuple(Elements.of_piece(piece, parameters[piece.name]) for piece in pieces) for pieces in cuts]
    found = []
    for layout in layouts:
        like = {name: parameters[name].new_empty(len(places)) for name, places in layout.items()}
        for pieces in cut_evenly(like, num_shards, may_cut=may_cut):
            found.append(tuple(Elements(p.name, layout[p.name][p.begin : p.end]) for p in pieces))
    return found
