"""A parcel: packed tensors, and the calls of a group that carry them."""

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import PackedTensors, write
from weft.distributed.group.calls import Call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.training.replicas import Traffic

__all__ = ["Parcel"]


@final
class Parcel:
    """Memory for tensors of these shapes. `pack`, `start`, `wait`; `tensors` are views of what it holds.

    It is the group's own memory, so it is packed once and read in place.
    """

    def __init__(self, group: AbstractGroup, tensors: Mapping[str, Tensor]) -> None:
        self._group = group
        packed = PackedTensors(tensors, group.empty)
        self.messages, self.tensors, self.num_bytes = packed.messages, packed.tensors, packed.num_bytes
        self._works: list[AbstractWork] = []
        self._started = 0.0
        self._ended: float | None = None

    @torch.no_grad()
    def pack(self, tensors: Mapping[str, Tensor], factor: float = 1.0) -> None:
        write(self.tensors, {name: tensors[name] for name in self.tensors})
        if factor != 1.0:
            for message in self.messages:
                message.mul_(factor)

    def start(self, make_call: Callable[[Tensor], Call]) -> None:
        """Start one call for each message."""
        self._started, self._ended = self._group.clock.now(), None
        self._works = [self._group.start(make_call(message)) for message in self.messages]

    def advance(self) -> None:
        """Note whether all calls are done. To ask is also what moves some groups on."""
        if self._works and self._ended is None and all(work.is_done() for work in self._works):
            self._ended = self._group.clock.now()

    def wait(self) -> Traffic:
        """Wait for the calls; what they cost."""
        waited = self._group.clock.now()
        for work in self._works:
            work.wait()
        self._works = []
        now = self._group.clock.now()
        ended = now if self._ended is None else self._ended
        return Traffic(now - waited, min(waited, ended) - self._started, self.num_bytes)
