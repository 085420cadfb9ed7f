"""The world's group with every call noted: one that no meeting and no waiting is around is told by its own name."""

from contextlib import AbstractContextManager
from typing import Protocol, final

import torch
from torch import Tensor

from weft.distributed.group.calls import Call
from weft.distributed.group.group import AbstractGroup, AbstractWork
from weft.distributed.script.world.whereabouts import Closable

__all__ = ["NotedGroup"]


class Notes(Protocol):
    """The part of InStep that a group needs."""

    def waiting_unless_noted(self, kind: str, closes: Closable) -> AbstractContextManager[None]: ...


@final
class NotedGroup(AbstractGroup):
    """Wraps any group of all ranks of a script."""

    def __init__(self, inner: AbstractGroup, notes: Notes) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self._inner, self._notes = inner, notes

    def start(self, call: Call) -> AbstractWork:
        return _NotedWork(self._inner.start(call), self, type(call).__name__)

    def run(self, call: Call) -> None:
        with self.waiting(type(call).__name__):
            self._inner.run(call)

    def split(self, colour: int, key: int) -> "NotedGroup":
        with self.waiting("split"):
            return NotedGroup(self._inner.split(colour, key), self._notes)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()

    def waiting(self, kind: str) -> AbstractContextManager[None]:
        return self._notes.waiting_unless_noted(kind, self._inner)


@final
class _NotedWork(AbstractWork):
    def __init__(self, inner: AbstractWork, group: NotedGroup, kind: str) -> None:
        self._inner, self._group, self._kind = inner, group, kind

    def wait(self) -> None:
        with self._group.waiting(self._kind):
            self._inner.wait()

    def is_done(self) -> bool:
        return self._inner.is_done()
