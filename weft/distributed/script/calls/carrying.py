"""Values of a script over a group: from one rank to all, or from all to all.

The first block of a message is of a fixed size, so that a number or two need one call and no length beforehand:

    | length: 8 bytes | the first bytes |      the other bytes, if there are more, in a call of their own
"""

import json
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.script.calls.trees import (
    as_json,
    joined_bytes,
    num_bytes,
    outline_of,
    split_bytes,
    value_of,
)
from weft.specs import CPU

__all__ = ["broadcast_bytes", "broadcast_value", "gather_bytes", "gather_tensor", "gather_values", "home_of"]

BLOCK_BYTES = 512
HEAD_BYTES = 8


def broadcast_value(group: AbstractGroup, value: Any, root: int = 0) -> Any:
    """The value of one rank, on all; the root keeps its own object. A collective call.

    Tensors come to the device of the first tensor that the receiving rank gave itself, else to the host.
    """
    outline, tensors = outline_of(value) if group.rank == root else (None, [])
    if group.size == 1:
        return value
    outline = json.loads(broadcast_bytes(group, as_json(outline), root))
    payload = joined_bytes(tensors) if group.rank == root else torch.empty(num_bytes(outline), dtype=torch.uint8)
    if len(payload):
        group.broadcast(payload, root)
    if group.rank == root:
        return value
    home = home_of(value)
    return value_of(outline, [tensor.to(home) for tensor in split_bytes(payload, outline)])


def gather_values(group: AbstractGroup, value: Any) -> list[Any]:
    """The values of all ranks, in rank order, on all of them. A collective call."""
    outline, tensors = outline_of(value)
    if group.size == 1:
        return [value]
    outlines = [json.loads(text) for text in gather_bytes(group, as_json(outline))]
    sizes = [num_bytes(its) for its in outlines]
    payloads = gather_tensor(group, joined_bytes(tensors), sizes)
    home = home_of(value)
    return [
        value_of(its, [tensor.to(home) for tensor in split_bytes(payload, its)])
        for its, payload in zip(outlines, payloads, strict=True)
    ]


def home_of(value: Any) -> torch.device:
    """Where the tensors of a value are: the device of the first one, and the CPU where there is none."""
    match value:
        case Tensor():
            return value.device
        case dict():
            inside = list(value.values())
        case list() | tuple():
            inside = list(value)
        case _:
            return CPU
    return next((home for item in inside if (home := home_of(item)) != CPU), CPU)


def gather_tensor(group: AbstractGroup, own: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """The vectors of all ranks, whose lengths all know."""
    whole = torch.empty(sum(sizes), dtype=own.dtype)
    if len(whole):
        group.all_gather(whole, own, tuple(sizes))
    return tuple(whole.split(sizes))


def broadcast_bytes(group: AbstractGroup, data: bytes, root: int = 0) -> bytes:
    """The bytes of one rank, on all. What the others give does not matter."""
    block = _block(data)
    group.broadcast(block, root)
    length = _length_in(block)
    begin = _bytes(block[HEAD_BYTES:][:length])
    if length == len(begin):
        return begin
    rest = _tensor(data[len(begin) :]) if group.rank == root else torch.empty(length - len(begin), dtype=torch.uint8)
    group.broadcast(rest, root)
    return begin + _bytes(rest)


def gather_bytes(group: AbstractGroup, data: bytes) -> list[bytes]:
    """The bytes of all ranks, in rank order."""
    blocks = torch.empty(group.size, BLOCK_BYTES, dtype=torch.uint8)
    group.all_gather(blocks, _block(data).unsqueeze(0))
    lengths = [_length_in(block) for block in blocks]
    begins = [_bytes(block[HEAD_BYTES:][:length]) for block, length in zip(blocks, lengths, strict=True)]
    left = [length - len(begin) for length, begin in zip(lengths, begins, strict=True)]
    rests = gather_tensor(group, _tensor(data[BLOCK_BYTES - HEAD_BYTES :]), left)
    return [begin + _bytes(rest) for begin, rest in zip(begins, rests, strict=True)]


def _block(data: bytes) -> Tensor:
    begin = len(data).to_bytes(HEAD_BYTES, "little") + data[: BLOCK_BYTES - HEAD_BYTES]
    return _tensor(begin.ljust(BLOCK_BYTES, b"\0"))


def _length_in(block: Tensor) -> int:
    return int.from_bytes(_bytes(block[:HEAD_BYTES]), "little")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
