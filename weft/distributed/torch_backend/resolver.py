"""Threads that complete futures: torch's C++ side waits for those and not for works."""

import queue
import threading
from collections.abc import Callable
from typing import final

__all__ = ["FutureResolver", "Settle"]

Settle = Callable[[], Callable[[], None]]
"""Waits for a call, and gives a function that completes its future."""


@final
class FutureResolver:
    """Completes futures, beginning with those that were added first, in a thread that the first one starts.

    A callback of a future runs in the thread that completes it, and may wait for a further future that it makes:
    PowerSGD's does. So an addition by a thread of the resolver itself sees to it that another is there for it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Settle | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_callbacks: set[int] = set()  # threads, by their numbers
        self._lock = threading.Lock()

    def add(self, settle: Settle) -> None:
        if not self._threads or self.is_here():
            self._see_to_a_free_thread()
        self._queue.put(settle)

    def is_here(self) -> bool:
        """Whether this thread is one of the resolver, in a callback."""
        return threading.get_ident() in self._in_callbacks

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join()

    def _see_to_a_free_thread(self) -> None:
        with self._lock:
            if len(self._in_callbacks) == len(self._threads):
                self._threads.append(threading.Thread(target=self._run, name="weft-futures", daemon=True))
                self._threads[-1].start()

    def _run(self) -> None:
        here = threading.get_ident()
        while (settle := self._queue.get()) is not None:
            complete = settle()
            self._in_callbacks.add(here)
            complete()
            self._in_callbacks.discard(here)
