"""Tensors put together from the parts that ranks hold: for proofs, and for whoever wants the whole model.

rank 0   parameter/w [0:2, :]   parameter/b          every rank tells what it has, as JSON, and then sends it;
rank 1   parameter/w [2:4, :]   parameter/b          of a part that several have, the last one's is taken
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from weft.distributed.group import AbstractGroup, gather_parts
from weft.distributed.group.dense import as_bytes, make_dense
from weft.training.checkpoint import Cut, HeldPart, Part, whole_cut

__all__ = ["gather_whole"]


def gather_whole(
    group: AbstractGroup, cut_of: Callable[[str], Cut | None], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every tensor that one of the ranks has a part of, whole, on the CPU, in the order of names; all ranks call it.

    Args:
        group: the ranks that together hold all parts.
        cut_of: the part that this rank's tensor is, or several parts; None for a tensor that is whole.
    """
    rows = [_describe(name, tensor, cut_of(name)) for name, tensor in tensors.items()]
    text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)
    data = [as_bytes(make_dense(tensor.detach()).cpu()) for tensor in tensors.values()]
    everyone = zip(gather_parts(group, text), gather_parts(group, torch.cat(data) if data else text[:0]), strict=True)
    found: dict[str, Tensor] = {}
    for rows_of_rank, data_of_rank in everyone:
        for name, cut, tensor in _read(rows_of_rank, data_of_rank):
            target = found.setdefault(name, torch.empty(cut.shape, dtype=tensor.dtype))
            cut.put(tensor, target)
    return {name: found[name] for name in sorted(found)}


def _describe(name: str, tensor: Tensor, cut: Cut | None) -> list[object]:
    """A number about a parameter, such as a count of steps, is whole, whatever part of the parameter is here."""
    if cut is None or tuple(tensor.shape) != cut.held_shape:
        cut = whole_cut(tensor.shape)
    kind = str(tensor.dtype).removeprefix("torch.")
    parts = [[held.part.offset, held.part.length, held.start, held.strides] for held in cut.parts]
    return [name, kind, cut.shape, cut.held_shape, parts]


def _read(text: Tensor, data: Tensor) -> Iterator[tuple[str, Cut, Tensor]]:
    begin = 0
    for name, kind, shape, held_shape, parts in json.loads(bytes(text.tolist())):
        dtype: torch.dtype = getattr(torch, kind)
        end = begin + math.prod(held_shape) * dtype.itemsize
        tensor = data[begin:end].clone().view(dtype).view(held_shape)
        held = (HeldPart(Part(tuple(at), tuple(length)), start, tuple(step)) for at, length, start, step in parts)
        yield name, Cut(tuple(shape), None, tuple(held), tuple(held_shape)), tensor
        begin = end
