"""A send to a peer that is not there."""

from typing import final

from weft.distributed.group.group import AbstractWork
from weft.errors import PeerLostError

__all__ = ["LostWork"]


@final
class LostWork(AbstractWork):
    """Ended when it was started, and not well."""

    def __init__(self, error: PeerLostError) -> None:
        self._error = error

    def wait(self) -> None:
        raise PeerLostError(str(self._error), self._error.peer)

    def is_done(self) -> bool:
        return True
