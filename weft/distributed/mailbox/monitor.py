"""How callers of a mailbox sleep until something changes."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import final

from weft.distributed.group.clock import AbstractClock, RealClock
from weft.distributed.mailbox.inbox import ReceiveRequest

__all__ = ["AbstractMonitor", "Peers", "Requests", "ThreadMonitor"]

Requests = Collection[ReceiveRequest]
Peers = Collection[int]


class AbstractMonitor(ABC):
    """Guards the state of a receiver with a lock, and lets callers sleep until it changes."""

    lock: AbstractContextManager[object]
    clock: AbstractClock

    @abstractmethod
    def check(self) -> None:
        """Raise where the caller's thread must end."""

    @abstractmethod
    def wait(self, is_over: Callable[[], bool], deadline: float, requests: Requests = (), peers: Peers = ()) -> bool:
        """Sleep until `is_over`; False when the deadline came first. The lock is held, and let go meanwhile.

        Args:
            requests: wake up when one of them is completed or lost.
            peers: wake up when one of them joins.
        """

    @abstractmethod
    def notify(self, requests: Requests = ()) -> None:
        """Wake those who wait for one of these requests, or for something else that has changed."""


@final
class ThreadMonitor(AbstractMonitor):
    """A condition variable: callers are threads, and time is real."""

    def __init__(self) -> None:
        self.lock = self._condition = threading.Condition()
        self.clock = RealClock()

    def check(self) -> None:
        pass

    def wait(self, is_over: Callable[[], bool], deadline: float, requests: Requests = (), peers: Peers = ()) -> bool:
        while not is_over():
            remaining = deadline - self.clock.now()
            if remaining <= 0:
                return False
            self._condition.wait(min(remaining, threading.TIMEOUT_MAX))
        return True

    def notify(self, requests: Requests = ()) -> None:
        self._condition.notify_all()
