"""A call of torch.distributed under way."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.errors import DeadlineError

__all__ = ["FutureResolver", "WeftWork"]

POLL_SECONDS = 1e-4


@final
class WeftWork(dist.Work):
    """One torch call, made of one or more of ours; `finish` puts results where torch wants them."""

    def __init__(
        self,
        works: Sequence[AbstractWork],
        result: list[Tensor],
        resolver: "FutureResolver",
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._works, self._result, self._finish, self._resolver = works, result, finish, resolver
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises DeadlineError where the call is not done in time. None, and 0 as in torch, are no limit."""
        if timeout is not None and timeout > timedelta(0):
            self._wait_until(time.monotonic() + timeout.total_seconds(), timeout)
        for work in self._works:
            work.wait()
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()
        return True

    def _wait_until(self, deadline: float, timeout: timedelta) -> None:
        while not self.is_completed():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"timed out waiting for a call (timeout: {timeout.total_seconds():g} s); "
                    "look at what the other ranks do, or wait for longer",
                    peers=(),
                )
            time.sleep(POLL_SECONDS)

    def is_completed(self) -> bool:
        return all(work.is_done() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return self._result

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        with self._lock:
            first, self._future = self._future is None, self._future or torch.futures.Future()
        if first:
            self._resolver.add(self)
        return self._future

    def resolve(self) -> None:
        """Called by the resolver's thread: wait, then complete the future."""
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            self._future.set_result(self._result)


@final
class FutureResolver:
    """A thread that completes futures, started by the first: torch's C++ side waits for those and not for works."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[WeftWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: WeftWork) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-futures", daemon=True)
            self._thread.start()
        self._works.put(work)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            thread.join()

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.resolve()
