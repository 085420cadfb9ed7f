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
        self._num_in_callbacks = 0
        self._lock = threading.Lock()

    def add(self, settle: Settle) -> None:
        if not self._threads or self.is_here():
            self._see_to_a_free_thread()
        self._queue.put(settle)

    def is_here(self) -> bool:
        """Whether this is a thread of the resolver, in a callback then."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join()

    def _see_to_a_free_thread(self) -> None:
        with self._lock:
            if self._num_in_callbacks == len(self._threads):
                self._threads.append(threading.Thread(target=self._run, name="weft-futures", daemon=True))
                self._threads[-1].start()

    def _run(self) -> None:
        while (settle := self._queue.get()) is not None:
            complete = settle()
            with self._lock:
                self._num_in_callbacks += 1
            complete()
            with self._lock:
                self._num_in_callbacks -= 1
