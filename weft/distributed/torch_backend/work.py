"""A call of torch.distributed under way."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from weft.distributed.group.group import AbstractWork
from weft.distributed.torch_backend.observers import Record
from weft.distributed.torch_backend.resolver import FutureResolver, Settle
from weft.errors import DeadlineError

__all__ = ["WeftWork", "ends_before"]

POLL_SECONDS = 1e-4


def ends_before(works: Sequence[AbstractWork], deadline: float) -> bool:
    """Wait for calls until a moment of the monotonic clock. Raises what made one fail."""
    while not all(work.is_done() for work in works):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    for work in works:
        work.wait()
    return True


@final
class WeftFuture(torch.futures.Future[list[Tensor]]):
    """A callback that waits for it completes it, and does not depend on other threads, which may be in some."""

    def __init__(self, settle: Settle, resolver: FutureResolver) -> None:
        super().__init__()
        self._settle, self._resolver = settle, resolver

    def wait(self) -> list[Tensor]:
        if self._resolver.is_here() and not self.done():
            self._settle()()
        return super().wait()


@final
class WeftWork(dist.Work):
    """One torch call, made of one or more of ours; `finish` puts results where torch wants them."""

    # Those that few works have are here, as small calls are counted in microseconds.
    timeout: timedelta | None = None  # of a wait that is given none
    source: Callable[[], int] | None = None  # of a receive from any rank: whom it came from, once it is done
    _record: Record | None = None
    _to_end: Record | None = None
    _future: "WeftFuture | None" = None
    _to_complete: "WeftFuture | None" = None

    def __init__(
        self,
        works: Sequence[AbstractWork],
        result: list[Tensor],
        resolver: FutureResolver,
        finish: Callable[[], object] | None = None,
    ) -> None:
        super().__init__()
        self._works, self._result, self._finish, self._resolver = works, result, finish, resolver
        self._lock = threading.Lock()

    def keep_record(self, record: Record) -> None:
        """Let the resolver end the call's record in torch.profiler."""
        self._record = self._to_end = record
        self._resolver.add(self.settle)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises DeadlineError where the call is not done in time. None, and 0 as in torch, are no limit."""
        timeout = timeout or self.timeout
        if timeout is not None and timeout > timedelta(0):
            self._wait_until(time.monotonic() + timeout.total_seconds(), timeout)
        self._end()
        if self._record is not None:
            self._record.wait()
        return True

    def _end(self) -> None:
        for work in self._works:
            work.wait()
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()

    def _wait_until(self, deadline: float, timeout: timedelta) -> None:
        if not ends_before(self._works, deadline):
            raise DeadlineError(
                f"timed out waiting for a call (timeout: {timeout.total_seconds():g} s); "
                "look at what the other ranks do, or wait for longer",
                peers=(),
            )

    def is_completed(self) -> bool:
        return all(work.is_done() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return self._result

    def _source_rank(self) -> int:
        return -1 if self.source is None else self.source()

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        if self._is_for_half_precision_hook():
            self.wait()
            return torch._C.fork(lambda: self._result)  # type: ignore[return-value]  # an inner class of torch
        with self._lock:
            first = self._future is None
            if first:
                self._future = self._to_complete = WeftFuture(self.settle, self._resolver)
        if first:
            self._resolver.add(self.settle)
        assert self._future is not None
        return self._future

    def _is_for_half_precision_hook(self) -> bool:
        """Whether DDP asks from within C++, where its built-in FP16 hook takes nothing but a list of tensors of C++.

        A future that Python completes holds a Python object; torch makes one with such a list only when it is done.
        """
        if not self._result or self._result[0].dtype is not torch.float16:
            return False
        caller = sys._getframe(2) if sys._getframe(1).f_back else None
        return caller is None or caller.f_code is _engine_run_backward.__code__

    def settle(self) -> Callable[[], None]:
        """Wait for the call, then give a function that completes the future, whose callbacks may wait for others."""
        error: Exception | None = None
        try:
            self._end()
        except Exception as failure:
            error = failure
        with self._lock:
            record, self._to_end = self._to_end, None
            future, self._to_complete = self._to_complete, None
        if record is not None:
            record.end()

        def complete() -> None:
            if future is None:
                return
            if error is not None:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            else:
                future.set_result(self._result)

        return complete
