"""A group whose collectives of floats travel in a wire format: for activations, and nothing that must be exact.

Sums of 16-bit floats are the group's own. A byte cannot be added to another, so ranks exchange messages, decode them
and add up in the order of ranks, their own decoded like the others': all have the same bits in the end.

    2 ranks       all-gather of whole messages                                             m bytes sent, rounded once
    n ranks       all-to-all of parts, each adds up its own, all-gather of the sums    2 (n-1)/n m,      rounded twice
                  (of 3 ranks and more, as an all-gather would send (n-1) m)

    reduce-scatter     the first half of that          all-gather     every rank's part, its own decoded too
    all-to-all         each piece encoded by itself
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.activations.wire_format import AbstractWireFormat
from weft.distributed.codecs.codec import Reduction
from weft.distributed.codecs.reduction import ReductionWork
from weft.distributed.group.calls import AllGather, AllReduce, AllToAll, Call, ReduceScatter, Sizes
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.recording import message_bytes

__all__ = ["CodedGroup"]

WHOLE = 2
"""Ranks up to which whole messages are gathered: of more, parts and sums are fewer bytes."""


@final
class CodedGroup(AbstractGroup):
    """Wraps any group, and counts what it is handed. Calls of whole numbers, of few numbers and of other reductions
    than sums pass as they are, and so do messages from rank to rank."""

    def __init__(self, inner: AbstractGroup, wire_format: AbstractWireFormat) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner = inner
        self._format = wire_format
        self.num_bytes = 0
        """Of the messages of all calls so far."""

    def start(self, call: Call) -> AbstractWork:
        steps = self._steps(call)
        if steps is not None:
            return _CodedWork(self._inner, self._counted(steps))
        self.num_bytes += message_bytes(call)
        return self._inner.start(call)

    def run(self, call: Call) -> None:
        steps = self._steps(call)
        if steps is not None:
            ReductionWork(self._inner, self._counted(steps)).wait()
        else:
            self.num_bytes += message_bytes(call)
            self._inner.run(call)

    def split(self, colour: int, key: int) -> AbstractGroup:
        return CodedGroup(self._inner.split(colour, key), self._format)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()

    def _steps(self, call: Call) -> Reduction | None:
        """The calls that stand for a call; None where it is passed on."""
        if self._format.dtype is None:
            return None
        size = self._size
        if isinstance(call, AllReduce) and call.op == "sum" and self._takes(call.tensor):
            if self._format.is_summable:
                return _add_up(self._format, call.tensor)
            return (_gather_sum if size <= WHOLE else _scatter_sum)(self._format, call.tensor, self._rank, size)
        if isinstance(call, ReduceScatter) and call.op == "sum" and self._takes(call.tensor):
            sizes = _in_elements(call.tensor, call.sizes, size)
            make = _add_up_part if self._format.is_summable else _part_of_sum
            return make(self._format, call.output, call.tensor, sizes, self._rank)
        if isinstance(call, AllGather) and self._takes(call.output):
            return _gather(self._format, call.output, call.tensor, _in_elements(call.output, call.sizes, size))
        # What a rank sends and receives here differs from rank to rank: none may ask for the size.
        if isinstance(call, AllToAll) and call.tensor.is_floating_point():
            sent = _in_elements(call.tensor, call.send_sizes, size)
            return _swap(self._format, call.output, call.tensor, sent, _in_elements(call.output, call.recv_sizes, size))
        return None

    def _counted(self, steps: Reduction) -> Reduction:
        while True:
            try:
                calls = next(steps)
            except StopIteration as end:
                result: Tensor = end.value
                return result
            self.num_bytes += sum(map(message_bytes, calls if isinstance(calls, tuple) else (calls,)))
            yield calls

    def _takes(self, tensor: Tensor) -> bool:
        return self._format.takes(tensor.numel(), tensor.dtype)


@final
class _CodedWork(AbstractWork):
    def __init__(self, group: AbstractGroup, steps: Reduction) -> None:
        self._work: ReductionWork | None = ReductionWork(group, steps)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def is_done(self) -> bool:
        """Messages are decoded by `wait`."""
        return self._work is None


def _in_elements(tensor: Tensor, sizes: Sizes | None, num_parts: int) -> Sizes:
    """From rows of parts to their elements."""
    if sizes is None:
        return (tensor.numel() // num_parts,) * num_parts
    row = tensor[0].numel() if len(tensor) else 0
    return tuple(row * size for size in sizes)


def _add_up(wire_format: AbstractWireFormat, tensor: Tensor) -> Reduction:
    message = wire_format.encode(tensor)
    yield AllReduce(message)
    return _write(tensor, wire_format.decode(message, tensor.numel(), tensor.dtype))


def _add_up_part(wire_format: AbstractWireFormat, output: Tensor, tensor: Tensor, sizes: Sizes, rank: int) -> Reduction:
    message = wire_format.encode(tensor)
    part = message.new_empty(sizes[rank])
    yield ReduceScatter(part, message, "sum", sizes)
    return _write(output, wire_format.decode(part, sizes[rank], output.dtype))


def _gather_sum(wire_format: AbstractWireFormat, tensor: Tensor, rank: int, size: int) -> Reduction:
    message = wire_format.encode(tensor)
    everyone = message.new_empty((size, message.numel()))
    yield AllGather(everyone, message.unsqueeze(0))
    return _write(tensor, _sum_of(wire_format, list(everyone), tensor.numel(), tensor.dtype))


def _scatter_sum(wire_format: AbstractWireFormat, tensor: Tensor, rank: int, size: int) -> Reduction:
    length, left = divmod(tensor.numel(), size)
    sizes = tuple(length + (part < left) for part in range(size))
    own = tensor.new_empty(sizes[rank])
    yield from _part_of_sum(wire_format, own, tensor, sizes, rank)
    yield from _gather(wire_format, tensor, own, sizes)
    return tensor


def _part_of_sum(wire_format: AbstractWireFormat, output: Tensor, tensor: Tensor, sizes: Sizes, rank: int) -> Reduction:
    lengths = tuple(map(wire_format.length, sizes))
    message = torch.cat([wire_format.encode(part) for part in tensor.reshape(-1).split(sizes)])
    received = message.new_empty((len(sizes), lengths[rank]))
    yield AllToAll(received.view(-1), message, lengths, (lengths[rank],) * len(sizes))
    return _write(output, _sum_of(wire_format, list(received), sizes[rank], output.dtype))


def _gather(wire_format: AbstractWireFormat, output: Tensor, tensor: Tensor, sizes: Sizes) -> Reduction:
    lengths = tuple(map(wire_format.length, sizes))
    message = wire_format.encode(tensor)
    everyone = message.new_empty(sum(lengths))
    yield AllGather(everyone, message, lengths)
    return _write(output, _decode_parts(wire_format, everyone, lengths, sizes, output.dtype))


def _swap(wire_format: AbstractWireFormat, output: Tensor, tensor: Tensor, sent: Sizes, received: Sizes) -> Reduction:
    message = torch.cat([wire_format.encode(part) for part in tensor.reshape(-1).split(sent)])
    lengths = tuple(map(wire_format.length, received))
    everyone = message.new_empty(sum(lengths))
    yield AllToAll(everyone, message, tuple(map(wire_format.length, sent)), lengths)
    return _write(output, _decode_parts(wire_format, everyone, lengths, received, output.dtype))


def _sum_of(
    wire_format: AbstractWireFormat, messages: Sequence[Tensor], num_elements: int, dtype: torch.dtype
) -> Tensor:
    """In the order of ranks; of 16-bit floats in 32 bits, rounded once."""
    wide = torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype
    total = wire_format.decode(messages[0], num_elements, wide)
    for message in messages[1:]:
        total.add_(wire_format.decode(message, num_elements, wide))
    return total


def _decode_parts(
    wire_format: AbstractWireFormat, everyone: Tensor, lengths: Sizes, sizes: Sizes, dtype: torch.dtype
) -> Tensor:
    ends = list(accumulate(lengths))
    parts = [everyone[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return torch.cat([wire_format.decode(part, size, dtype) for part, size in zip(parts, sizes, strict=True)])


def _write(output: Tensor, numbers: Tensor) -> Tensor:
    return output.copy_(numbers.view(output.shape))
