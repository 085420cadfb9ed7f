"""A parcel: tensors by name, packed into one flat message for each type, and what carries them.

weights      w1 (float32)   b1 (float32)   scale (float64)
messages     [ w1 | b1 ]                   [ scale ]
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.training.replicas import Traffic

__all__ = ["FlatTensors", "Parcel", "write"]


@final
class FlatTensors:
    """Memory for tensors of these shapes, one flat tensor for each type; `tensors` are views of it.

    Args:
        tensors: of which it begins as a copy.
        empty: makes the memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], empty: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name, tensor in tensors.items():
            by_type.setdefault(tensor.dtype, []).append(name)
        self._names = list(by_type.values())
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        sizes = [sum(tensors[name].numel() for name in names) for names in self._names]
        self.flats = [empty((size,), dtype) for size, dtype in zip(sizes, by_type, strict=True)]
        self.tensors = self.views_of(self.flats)
        self.num_bytes = sum(flat.nbytes for flat in self.flats)
        write(self.tensors, tensors)

    def views_of(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors in flat ones like these, by name."""
        views: dict[str, Tensor] = {}
        for names, flat in zip(self._names, flats, strict=True):
            parts = flat.split([self._shapes[name].numel() for name in names])
            views |= {name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)}
        return views

    def accepts(self, flats: Sequence[Tensor]) -> bool:
        """Whether these are like its own."""
        return [(flat.shape, flat.dtype) for flat in flats] == [(flat.shape, flat.dtype) for flat in self.flats]


@final
class Parcel:
    """Memory for tensors of these shapes. `pack`, `start`, `wait`; `tensors` are views of what it holds.

    It is the group's own memory, so it is packed once and read in place.
    """

    def __init__(self, group: AbstractGroup, tensors: Mapping[str, Tensor]) -> None:
        self._group = group
        flat = FlatTensors(tensors, group.empty)
        self.messages, self.tensors, self.num_bytes = flat.flats, flat.tensors, flat.num_bytes
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


@torch.no_grad()
def write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write the values into the tensors of the same names."""
    for name, value in values.items():
        tensors[name].copy_(value)
