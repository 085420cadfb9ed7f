"""Signals that end a command: it cleans up first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["use_orderly_end"]


@contextmanager
def use_orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP in the block leave it as an exception does, so that ranks are ended and folders removed; then
    they end this process, as they would have at once. One that is ignored (nohup) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if not came:
            came.append(number)
            raise SystemExit(128 + number)

    signals = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in signals:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        if came:
            signal.raise_signal(came[0])
