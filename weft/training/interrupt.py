"""Ctrl-C that ends training between two steps, when the state is whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from weft.training.events import Event, StepEnded, StepStarted, StopTraining

__all__ = ["Interrupt", "use_interrupt"]


class Interrupt:
    """A listener that ends training before or after the next step once `requested` is set.

    An evaluation that is under way is finished first, and kept.
    """

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, event: Event) -> None:
        if self.requested and isinstance(event, StepStarted | StepEnded):
            raise StopTraining("interrupted")


@contextmanager
def use_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a request; a second one, for the impatient, is a KeyboardInterrupt at once.

    Signals belong to the main thread: elsewhere this changes nothing.
    """
    interrupt = Interrupt()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
