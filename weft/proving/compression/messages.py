"""Which elements travel together, from the rules that the documentation states.

parameters     w1 b1 w2 b2 w3 b3
messages       [b3 w3 b2]  [w2]  [b1]  [w1]        last first; closed at 1 MiB; a tensor of so much travels alone
by owner       [b3 w3 | b2] ...                    where ranks own parts of sums, each part is a message of its own
differences    [w1 b1 w2 b2 w3 b3]                 of weights: all together
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.distributed.placement.cut import cut_evenly

__all__ = ["Message", "Range", "messages_of_gradients", "messages_of_weights"]

FULL = 2**20
"""Bytes."""


@dataclass(frozen=True)
class Range:
    """Elements `begin` to `end` of a tensor of this shape, in the order of its memory."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.end - self.begin == torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Message:
    """Ranges that lie one after the other."""

    ranges: tuple[Range, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(own.end - own.begin for own in self.ranges)

    def take(self, tensors: Mapping[str, Tensor | None], like: Mapping[str, Tensor]) -> Tensor:
        """The elements of these tensors, flat; zeros of one that is not there."""
        parts = []
        for own in self.ranges:
            tensor = tensors.get(own.name)
            flat = torch.zeros_like(like[own.name]) if tensor is None else tensor.detach()
            parts.append(flat.reshape(-1)[own.begin : own.end])
        return torch.cat(parts)

    def put(self, values: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """The elements into tensors of their names, which are contiguous."""
        for own, part in zip(self.ranges, values.split(self.sizes), strict=True):
            tensors[own.name].view(-1)[own.begin : own.end] = part


def messages_of_gradients(parameters: Mapping[str, Tensor], num_owners: int = 1) -> list[Message]:
    """Of all that are trained."""
    groups: list[list[str]] = [[]]
    for name in reversed([name for name, parameter in parameters.items() if parameter.requires_grad]):
        last, size = groups[-1], parameters[name].nbytes
        is_other = bool(last) and parameters[last[0]].dtype != parameters[name].dtype
        if is_other or size >= FULL or sum(parameters[other].nbytes for other in last) >= FULL:
            groups.append([])
        groups[-1].append(name)
    return [message for names in groups if names for message in _by_owner(parameters, names, num_owners)]


def messages_of_weights(parameters: Mapping[str, Tensor]) -> list[Message]:
    """Of differences of weights, one message for each type."""
    types = dict.fromkeys(parameter.dtype for parameter in parameters.values())
    alike = [[name for name, parameter in parameters.items() if parameter.dtype == dtype] for dtype in types]
    return [message for names in alike for message in _by_owner(parameters, names, 1)]


def _by_owner(parameters: Mapping[str, Tensor], names: Sequence[str], num_owners: int) -> list[Message]:
    if num_owners == 1:
        return [Message(tuple(Range(name, 0, parameters[name].numel(), _shape(parameters[name])) for name in names))]
    parts = cut_evenly({name: parameters[name] for name in names}, num_owners)
    found = [tuple(Range(p.name, p.begin, p.end, _shape(parameters[p.name])) for p in pieces) for pieces in parts]
    return [Message(ranges) for ranges in found if ranges]


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
