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
    """Completes futures, beginning with those that were added first.

    A callback of a future runs in the thread that completes it, and may wait for another future: PowerSGD's does. So
    there is always a thread that is not in a callback while futures are to be completed.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Settle | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_in_callbacks = 0
        self._lock = threading.Lock()

    def add(self, settle: Settle) -> None:
        with self._lock:
            self._queue.put(settle)
            self._see_to_threads()

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join()

    def _see_to_threads(self) -> None:
        if self._num_in_callbacks == len(self._threads) and not self._queue.empty():
            self._threads.append(threading.Thread(target=self._run, name="weft-futures", daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (settle := self._queue.get()) is not None:
            complete = settle()
            with self._lock:
                self._num_in_callbacks += 1
                self._see_to_threads()
            complete()
            with self._lock:
                self._num_in_callbacks -= 1
