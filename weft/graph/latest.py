"""The latest few of what was made, by key."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Latest"]

T = TypeVar("T")


class Latest(Generic[T]):
    """Makes what is not there, and forgets what has not been asked for the longest.

    >>> latest = Latest[str](limit=2)
    >>> [latest.get(key, lambda: "new") for key in (1, 2, 1)], latest.get(1, lambda: "newer")
    (['new', 'new', 'new'], 'new')
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._made: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key in self._made:
            self._made.move_to_end(key)
            return self._made[key]
        self._made[key] = made = make()
        if len(self._made) > self._limit:
            self._made.popitem(last=False)
        return made
