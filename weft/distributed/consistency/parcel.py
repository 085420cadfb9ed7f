"""A parcel: packed tensors of a rank, and the calls of a group that carry them, or what a codec makes of them.

messages   what was packed, in full              [ w1 | b1 ] [ scale ]
sent       what travels instead                  [ encoded ] [       ]      without a codec both of these are
seen       what all who have it make of that     [ decoded ] [       ]      the messages themselves
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, PackedTensors, ReductionWork, decode_packed, write
from weft.distributed.group.calls import Call, Recv, Send
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.training.replicas import Traffic

__all__ = ["Parcel"]


@final
class Parcel:
    """Memory for tensors of these shapes. `pack`, start something, `wait`; `tensors` are views of the messages.

    It is the group's own memory, so it is packed once and read in place.
    """

    def __init__(self, group: AbstractGroup, tensors: Mapping[str, Tensor], codec: AbstractCodec | None = None) -> None:
        self._group = group
        self._codec = codec or ExactCodec()
        self._packed = packed = PackedTensors(tensors, group.empty)
        self.messages, self.tensors = packed.messages, packed.tensors
        self._memory = [self._codec.make_memory(bucket, group.empty) for bucket in packed.buckets]
        self.seen = packed.messages
        if not self._codec.is_exact:
            self.seen = [torch.empty_like(message) for message in packed.messages]
        self._works: list[AbstractWork | ReductionWork] = []
        self._arrivals: Sequence[Tensor] = ()
        self._started = 0.0
        self._ended: float | None = None
        self._num_bytes = 0
        self._encoding: float | None = None  # seconds, of messages that are reduced
        self._share = 1.0

    @torch.no_grad()
    def pack(self, tensors: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Args:
        factor: of a sum in which the factors of all ranks add up to 1.
        """
        self._share = factor
        write(self.tensors, {name: tensors[name] for name in self.tensors})
        if factor != 1.0:
            for message in self.messages:
                message.mul_(factor)

    # What may be started.

    def start(self, make_call: Callable[[Tensor], Call]) -> None:
        """One call for each message, as it is."""
        self._begin(self.messages)
        self._works += [self._group.start(make_call(message)) for message in self.messages]

    def reduce(self) -> None:
        """The messages become their decoded sum over all ranks, the same bits on all."""
        began = self._group.clock.now()
        encoded = self._encode()
        self._begin(encoded)
        self._encoding = None if self._codec.is_exact else self._started - began
        for bucket, sent, message in zip(self._packed.buckets, encoded, self.messages, strict=True):
            reduction = self._codec.reduce(bucket, sent, self._group, out=message)
            self._works.append(ReductionWork(self._group, reduction))

    def send(self, *peers: int) -> None:
        """Send the messages, encoded, and see here what the peers will see."""
        encoded = self.see()
        self._begin(encoded)
        self._works += [self._group.start(Send(sent, peer)) for peer in peers for sent in encoded]

    def receive(self, peer: int) -> None:
        """See here what a peer sends."""
        self._arrivals = self._places()
        self._begin(self._arrivals)
        self._works += [self._group.start(Recv(place, peer)) for place in self._arrivals]

    def exchange(self, sources: Sequence[int], targets: Sequence[int]) -> list[list[Tensor]]:
        """As `send`; and of every source memory for what it sends, to be decoded by `decode` when it is there."""
        arrivals = [[torch.empty_like(place) for place in self._places()] for _ in sources]
        self.send(*targets)
        for source, memory in zip(sources, arrivals, strict=True):
            self._works += map(self._group.start, map(partial(Recv, peer=source), memory))
        return arrivals

    def see(self) -> Sequence[Tensor]:
        """See here what others would see of the messages; the tensors to send for that."""
        encoded = self._encode()
        self._decode_into(self.seen, encoded)
        return encoded

    # How it goes on.

    def advance(self) -> None:
        """Note whether all calls are done. To ask is also what moves some groups on."""
        if self._works and self._ended is None and all(work.is_done() for work in self._works):
            self._ended = self._group.clock.now()

    def wait(self) -> Traffic:
        """Wait for the calls; what they cost."""
        waited = self._group.clock.now()
        for work in self._works:
            work.wait()
        now = self._group.clock.now()
        self._decode_into(self.seen, self._arrivals)
        self._arrivals = ()
        ended = now if self._ended is None else self._ended
        traffic = Traffic(now - waited, min(waited, ended) - self._started, self._num_bytes)
        works, self._works = self._works, []
        return traffic if self._encoding is None else self._coded(traffic, self._encoding, works)

    def _coded(self, traffic: Traffic, encoding: float, works: Sequence[AbstractWork | ReductionWork]) -> Traffic:
        """With what reductions counted; these decode while they are waited for."""
        reductions = [work for work in works if isinstance(work, ReductionWork)]
        decoding, num_bytes = sum(r.computed for r in reductions), sum(r.num_bytes for r in reductions)
        return replace(
            traffic,
            num_bytes=num_bytes,
            coding=encoding + decoding,
            under_way=traffic.hidden + max(traffic.exposed - decoding, 0.0),
            dense_bytes=sum(message.nbytes for message in self.messages),
            payload_bytes=num_bytes,
            wire_bytes=sum(r.wire_bytes for r in reductions),
        )

    def decode(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """The messages of a parcel like this one, of what was sent for them."""
        return decode_packed(self._codec, self._packed, sent)

    def views_of(self, messages: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors in messages like these, by name."""
        return self._packed.views_of(messages)

    def _begin(self, sent: Sequence[Tensor]) -> None:
        self._started, self._ended = self._group.clock.now(), None
        self._works, self._num_bytes, self._encoding = [], sum(tensor.nbytes for tensor in sent), None

    def _places(self) -> Sequence[Tensor]:
        """Where what others encoded may be received."""
        pairs = zip(self._memory, self.messages, strict=True)
        return [message if memory is None else memory for memory, message in pairs]

    def _encode(self) -> Sequence[Tensor]:
        triples = zip(self._packed.buckets, self.messages, self._memory, strict=True)
        return [self._codec.encode(bucket, message, memory, share=self._share) for bucket, message, memory in triples]

    def _decode_into(self, places: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        for bucket, tensor, place in zip(self._packed.buckets, sent, places, strict=False):
            self._codec.decode(bucket, tensor, place)
