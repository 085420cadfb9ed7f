"""The scheduler of the virtual cluster: ranks are threads that run one at a time, in the order of virtual time.

    events, by (time, rank, sequence)            whose turn it is: exactly one thread runs
      (0.000, 0)  resume rank 0  ------------->  rank 0 computes ... charge(0.002)
      (0.000, 1)  resume rank 1  ------------->  rank 1 computes ... waits for a message
      (0.001, 1)  a message arrives              (run by whichever thread has the turn)
      (0.002, 0)  resume rank 0  ------------->  ...

A rank gives its turn away only where it waits or lets time pass, and keeps it where the next event is its own. So time
never runs backwards, nothing runs at the same time as anything else, and the same program gives the same run.
"""

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, final

from weft.distributed.virtual.process_state import AbstractProcessState
from weft.script_lines import find_script_frame, line_of_frame

__all__ = ["Action", "Scheduler", "StoppedError"]

Action = Callable[[], None]

SIGNAL_SECONDS = 0.2


class StoppedError(BaseException):
    """The run is over; unwinds a rank's thread. Not an Exception, so that no program takes it for its own."""


@final
class _Rank:
    __slots__ = ("is_over", "parked", "state", "thread", "turn")

    def __init__(self, thread: threading.Thread, state: Any) -> None:
        self.thread = thread
        self.state = state
        self.turn = threading.Lock()
        self.turn.acquire()
        self.is_over = False
        self.parked = 0


@final
class Scheduler:
    """Runs `body(rank)` for each rank. `on_timeout(rank)` is called for a rank that was parked for `timeout`
    virtual seconds, or that nothing can wake any more. Every rank has a `state` of the process for itself."""

    def __init__(
        self, size: int, timeout: float, on_timeout: Callable[[int], None], state: AbstractProcessState
    ) -> None:
        self.now = 0.0
        self.num_events = 0
        self.num_switches = 0
        self.failure: tuple[int | None, BaseException] | None = None
        self._size = size
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._state = state
        self._is_stopping = False
        self._events: list[tuple[float, int, int, Action | None]] = []
        self._sequence = 0
        # The timeout is the same for all and time does not run backwards, so deadlines come in order.
        self._deadlines: deque[tuple[float, int, int]] = deque()
        self._num_parks = 0
        self._ranks: list[_Rank] = []
        self._all_over = threading.Lock()

    # Called from anywhere.

    def at(self, moment: float, rank: int, action: Action | None) -> None:
        """Run the action at a moment; None resumes the rank."""
        self._sequence += 1
        heappush(self._events, (moment, rank, self._sequence, action))

    def resume(self, rank: int) -> None:
        """Wake a parked rank now; one that is not parked is left alone."""
        if self._ranks[rank].parked:
            self._ranks[rank].parked = 0
            self.at(self.now, rank, None)

    @property
    def has_events(self) -> bool:
        """Whether anything will happen by itself."""
        return bool(self._events)

    def is_over(self, rank: int) -> bool:
        return self._ranks[rank].is_over

    def lines(self) -> list[str]:
        """Where each rank is in the script that it runs, as ` at train.py:12: loss.backward()`; nothing where it runs
        none."""
        frames = sys._current_frames()
        found = [find_script_frame(frames.get(state.thread.ident or 0)) for state in self._ranks]
        return ["" if frame is None else f" at {line_of_frame(frame)}" for frame in found]

    def fail(self, rank: int | None, error: BaseException) -> None:
        """End the run; the first error is the one that counts."""
        if self.failure is None:
            self.failure = (rank, error)
        self._is_stopping = True

    # Called by the thread of the rank that runs.

    def check(self) -> None:
        if self._is_stopping:
            raise StoppedError

    def sleep_until(self, rank: int, moment: float) -> None:
        """Let virtual time pass; other ranks run meanwhile."""
        self.check()
        if moment <= self.now:
            return
        event_first = self._events and self._events[0][:2] < (moment, rank)
        if event_first or (self._deadlines and self._deadlines[0][0] < moment):
            self.at(moment, rank, None)
            self._take_turns(rank)
        else:
            self.now = moment

    def park(self, rank: int) -> None:
        """Wait until `resume`."""
        self.check()
        self.mark_parked(rank)
        self._take_turns(rank)

    def mark_parked(self, rank: int) -> None:
        """Mark a rank as parked from now, for another timeout."""
        self._num_parks += 1
        self._ranks[rank].parked = self._num_parks
        self._deadlines.append((self.now + self._timeout, rank, self._num_parks))

    # The run.

    def run(self, body: Callable[[int], None]) -> None:
        """Run all ranks to their end, or to the first failure. No thread is left when it returns."""
        state = self._state.take()
        self._all_over.acquire()
        for rank in range(self._size):
            thread = threading.Thread(
                target=self._run_rank, args=(rank, body), name=f"virtual rank {rank}", daemon=True
            )
            self._ranks.append(_Rank(thread, state))
            self.at(0.0, rank, None)
        # Between the first thread's start and the wait for the last one, Ctrl-C would leave ranks without a keeper.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        self._start_threads()
        self._pass_on()
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            # A signal that comes just before a wait without end does not wake it, and its handler never runs.
            while not self._all_over.acquire(timeout=SIGNAL_SECONDS):
                pass
        except BaseException as error:  # Ctrl-C: the rank that runs stops at its next call
            self.fail(None, error)
            self._all_over.acquire()
        finally:
            for one in self._ranks:
                if one.thread.ident is not None:
                    one.thread.join()
            self._state.put(state)

    def _start_threads(self) -> None:
        try:
            for state in self._ranks:
                state.thread.start()
        except RuntimeError as error:  # the machine has no more threads
            self.fail(None, error)
            for state in self._ranks:
                state.is_over = not state.thread.is_alive()

    def _run_rank(self, rank: int, body: Callable[[int], None]) -> None:
        me = self._ranks[rank]
        me.turn.acquire()
        try:
            self.check()
            self._state.put(me.state)
            body(rank)
        except StoppedError:
            pass
        except BaseException as error:
            self.fail(rank, error)
        finally:
            me.is_over = True
            self._pass_on()

    def _take_turns(self, rank: int) -> None:
        """Run events until it is this rank's turn."""
        following = self._next_rank()
        if following == rank:
            return
        me = self._ranks[rank]
        if following is not None:
            self.num_switches += 1
            me.state = self._state.take()
            self._ranks[following].turn.release()
            me.turn.acquire()
        self.check()
        self._state.put(me.state)

    def _pass_on(self) -> None:
        """Give the turn to the next rank, when stopping to any that is left, at last back to `run`."""
        following = self._next_rank()
        if following is None:
            following = next((rank for rank, state in enumerate(self._ranks) if not state.is_over), None)
        turn = self._all_over if following is None else self._ranks[following].turn
        turn.release()

    def _next_rank(self) -> int | None:
        """Run events up to the next that resumes a rank; None when all ranks are over or must stop."""
        events, deadlines = self._events, self._deadlines
        while not self._is_stopping:
            while deadlines and self._ranks[deadlines[0][1]].parked != deadlines[0][2]:
                deadlines.popleft()
            if deadlines and (not events or deadlines[0][0] < events[0][0]):
                self.now, rank, _ = deadlines.popleft()
                self._on_timeout(rank)
                continue
            if not events:
                return None
            self.now, rank, _, action = heappop(events)
            self.num_events += 1
            if action is None:
                return rank
            action()
        return None
