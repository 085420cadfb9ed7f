"""A message on its way out."""

import threading
from collections.abc import Sequence
from typing import final

from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.errors import PeerLostError

__all__ = ["SendWork", "lost_send"]


@final
class SendWork(AbstractWork):
    """Holds its tensors until they may be changed again."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self._tensors: Sequence[Tensor] | None = tensors
        self._ended = threading.Event()
        self._error: PeerLostError | None = None

    def end(self, error: PeerLostError | None = None) -> None:
        self._error, self._tensors = error, None
        self._ended.set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise PeerLostError(str(self._error), self._error.peer)

    def is_done(self) -> bool:
        return self._ended.is_set()


def lost_send(error: PeerLostError) -> SendWork:
    """A send to a peer that is not there: ended, with this error."""
    work = SendWork()
    work.end(error)
    return work
