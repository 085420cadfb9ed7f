"""How encoded messages are added up among the ranks of a group: by its all-reduce, or each part at its owner."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec, Reduction
from weft.distributed.codecs.packing import Bucket
from weft.distributed.group.calls import AllReduce, AllToAll, ReduceOp, Send
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.group.recording import handed_bytes, wire_bytes

__all__ = ["ReductionWork", "add_encoded", "scatter_encoded"]


def add_encoded(codec: AbstractCodec, bucket: Bucket, sent: Tensor, op: ReduceOp, out: Tensor | None) -> Reduction:
    """The group adds them up, and the total is decoded once.

    Args:
        codec: of this rank; its messages may be summed.
        bucket: of the message.
        sent: as the codec encoded it; holds the encoded total in the end.
        op: `sum` or `mean`.
        out: where the total is written; None to make memory for it.
    """
    yield AllReduce(sent, op)
    return codec.decode(bucket, sent, out)


def scatter_encoded(
    codec: AbstractCodec, part: Bucket, sent: Sequence[Tensor], group: AbstractGroup, out: Tensor
) -> Reduction:
    """A reduce-scatter of messages that cannot be cut: every rank encodes each part by itself, and sends it to its
    owner, who decodes them and adds them up in the order of ranks.

        rank 0   [ part 0 ][ part 1 ]           rank 0 has   part 0 of 0 + part 0 of 1
        rank 1   [ part 0 ][ part 1 ]           rank 1 has   part 1 of 0 + part 1 of 1

    Args:
        codec: of this rank.
        part: of a bucket, this rank's.
        sent: every part, encoded, in the order of their owners.
        group: of all ranks.
        out: where the sum of this rank's part is written.
    """
    lengths = torch.tensor([message.numel() for message in sent])
    theirs = torch.full_like(lengths, sent[group.rank].numel())
    if not codec.is_even:
        yield AllToAll(theirs, lengths)
    sizes = tuple(theirs.tolist())
    arrived = sent[0].new_empty(sum(sizes))
    yield AllToAll(arrived, torch.cat(list(sent)), tuple(lengths.tolist()), sizes)
    messages = arrived.split(sizes)
    total = codec.decode(part, messages[0], out)
    for message in messages[1:]:
        total.add_(codec.decode(part, message).view_as(total))
    return total


@final
class ReductionWork:
    """A reduction that a group carries out. Its first calls are started at once, later ones when it is waited for:
    ranks start calls in the same order, and none may depend on which message came first.

    Messages that it sends are waited for in the end, not where they are started: the length of a message may travel
    just before it, and two ranks that send each other both never wait for each other's second receive.
    """

    def __init__(self, group: AbstractGroup, reduction: Reduction) -> None:
        self._group = group
        self._reduction = reduction
        self._works: list[AbstractWork] = []
        self._sends: list[tuple[Send, AbstractWork]] = []  # with their tensors, which the reduction may have let go
        self._total: Tensor | None = None
        self.computed = 0.0
        """Seconds between calls, of decoding and adding up."""
        self.num_bytes = 0
        """Handed to the transport, in all calls so far."""
        self.wire_bytes = 0
        """That left this rank for these calls."""
        self._advance()

    def is_done(self) -> bool:
        """Whether the calls under way are done. To ask is also what moves some groups on."""
        return all(work.is_done() for work in self._works)

    def go_on(self) -> None:
        """Wait for the calls under way, and start the next."""
        if self._total is None:
            for work in self._works:
                work.wait()
            self._advance()

    def wait(self) -> Tensor:
        """The decoded total. May be called once."""
        while self._total is None:
            self.go_on()
        for _, work in self._sends:
            work.wait()
        return self._total

    def _advance(self) -> None:
        """Start the next calls, or keep the total."""
        began = self._group.clock.now()
        try:
            calls = next(self._reduction)
        except StopIteration as end:
            self._total = end.value
            return
        finally:
            self.computed += self._group.clock.now() - began
        self._works = []
        for call in calls if isinstance(calls, tuple) else (calls,):
            work = self._group.start(call)
            self.num_bytes += handed_bytes(call)
            self.wire_bytes += wire_bytes(call, self._group.rank, self._group.size)
            if isinstance(call, Send):
                self._sends.append((call, work))
            else:
                self._works.append(work)
