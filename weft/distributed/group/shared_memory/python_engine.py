"""The engine in Python, for machines without a compiler: the same calls, the same order of sums, the same bits.

Calls advance only while somebody waits for one or asks whether it is done: there is no thread behind them.
"""

import mmap
import select
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from weft.distributed.group.shared_memory import request as codes
from weft.distributed.group.shared_memory.engine import AbstractTransferEngine, EngineConfig, Outcome, Reason, Timing
from weft.distributed.group.shared_memory.python_calls import Collectives, Messages, MismatchError
from weft.distributed.group.shared_memory.python_memory import Layout, PythonMemory
from weft.distributed.group.shared_memory.request import Request

__all__ = ["PythonEngine", "arena_offset", "segment_bytes"]

SHORT_SLEEP, LONG_SLEEP = 20e-6, 1e-3  # seconds
LOOK_SECONDS = 0.005
GAP_SECONDS = 1.0  # between two rounds of waiting: this rank was frozen, and its peers maybe too


def segment_bytes(size: int, arena_bytes: int) -> int:
    return Layout(size).arenas + size * arena_bytes


def arena_offset(size: int, arena_bytes: int, rank: int) -> int:
    return Layout(size).arenas + rank * arena_bytes


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A call under way, told from others by its identity."""

    request: Request
    queued: int
    steps: Iterator[int]
    begun: int = 0
    ended: int = 0
    waited: int = 0
    source: int = -1
    waits_for: int | None = None
    outcome: Outcome | None = None


@final
class PythonEngine(AbstractTransferEngine):
    """One rank's engine over `memory`."""

    def __init__(self, memory: mmap.mmap, config: EngineConfig) -> None:
        self._memory = PythonMemory(memory, config.rank, config.size)
        self._rank, self._pidfds, self._timeout = config.rank, config.pidfds, config.timeout
        self._run_collective = Collectives(self._memory).run
        self._messenger = Messages(self._memory)
        self._collectives: list[_OpenCall] = []
        self._messages: list[_OpenCall] = []
        self._calls: dict[int, _OpenCall] = {}
        self._next_handle = 1
        self._lock = threading.RLock()
        self._is_closed = False

    def start(self, request: Request) -> int:
        with self._lock:
            if request.kind == codes.SEND:
                steps, queue = self._messenger.send(request), self._messages
            elif request.kind == codes.RECV:
                steps, queue = self._messenger.receive(request), self._messages
            else:
                steps, queue = self._run_collective(request), self._collectives
            call = _OpenCall(request, time.monotonic_ns(), steps)
            queue.append(call)
            handle, self._next_handle = self._next_handle, self._next_handle + 1
            self._calls[handle] = call
            if self._is_closed:
                self._abandon(Outcome(Reason.CLOSED, self._rank))
            return handle

    def run(self, request: Request) -> Outcome | None:
        handle = self.start(request)
        outcome = self.wait(handle)
        self.forget(handle)
        return outcome

    def wait(self, handle: int) -> Outcome | None:
        call, begin = self._calls[handle], time.monotonic_ns()
        last_move = last_look = now = time.monotonic()
        nap = SHORT_SLEEP
        while not call.ended:
            before, now = now, time.monotonic()
            if now - before > GAP_SECONDS:  # a rank that did not run cannot tell how long its peers were silent
                last_move += now - before
            if self._advance():
                last_move, nap = now, SHORT_SLEEP
                continue
            if now - last_look > LOOK_SECONDS:
                last_look = now
                self._look_at_peers(is_late=now - last_move > self._timeout)
            time.sleep(nap)
            nap = min(2 * nap, LONG_SLEEP)
        call.waited += time.monotonic_ns() - begin
        return call.outcome

    def is_done(self, handle: int) -> bool:
        call = self._calls[handle]
        if not call.ended:
            self._advance()
        return call.ended != 0

    def timing(self, handle: int) -> Timing:
        call = self._calls[handle]
        return Timing(call.queued, call.begun, call.ended, call.waited)

    def source(self, handle: int) -> int:
        return self._calls[handle].source

    def forget(self, handle: int) -> None:
        self._calls.pop(handle, None)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._abandon(Outcome(Reason.CLOSED, self._rank))
                self._memory.publish(self._memory.left, self._rank, 1)

    def _advance(self) -> bool:
        """Advance all calls once; whether one of them ended or moved."""
        with self._lock:
            failure = self._memory.failure
            if failure is not None:
                self._abandon(failure)
                return True
            steps, num_open = self._memory.num_steps, len(self._collectives) + len(self._messages)
            for call in [*self._collectives[:1], *self._movable_messages()]:
                self._step(call)
            return (self._memory.num_steps, len(self._collectives) + len(self._messages)) != (steps, num_open)

    def _movable_messages(self) -> list[_OpenCall]:
        """All that are to come, and of those to one rank the first: the packets of two must not mix."""
        first_sends: dict[int, _OpenCall] = {}
        for call in self._messages:
            if call.request.kind == codes.SEND:
                first_sends.setdefault(call.request.root, call)
        return [c for c in self._messages if c.request.kind == codes.RECV or first_sends[c.request.root] is c]

    def _step(self, call: _OpenCall) -> None:
        call.begun = call.begun or time.monotonic_ns()
        try:
            call.waits_for = next(call.steps)
        except StopIteration as end:
            call.source = end.value if end.value is not None else call.request.root
            self._end(call, None)
        except MismatchError as mismatch:
            if call in self._collectives:
                self._memory.fail(Reason.MISMATCH, mismatch.args[0])
            self._end(call, Outcome(Reason.MISMATCH, mismatch.args[0]))
        except BaseException:  # such as Ctrl-C: the call stands half way, and this rank cannot go on
            self._memory.fail(Reason.DIED, self._rank)
            self._end(call, Outcome(Reason.DIED, self._rank))
            raise

    def _end(self, call: _OpenCall, outcome: Outcome | None) -> None:
        (self._collectives if call in self._collectives else self._messages).remove(call)
        call.outcome = outcome
        call.ended = time.monotonic_ns()

    def _abandon(self, outcome: Outcome) -> None:
        for call in [*self._collectives, *self._messages]:
            self._end(call, outcome)

    def _look_at_peers(self, *, is_late: bool) -> None:
        with self._lock:
            waited_for = [call.waits_for for call in [*self._collectives[:1], *self._messages]]
            poll = select.poll()
            for descriptor in self._pidfds:
                poll.register(descriptor, select.POLLIN)
            ended = {descriptor for descriptor, _ in poll.poll(0)}
            has_left = [bool(left) for left in self._memory.left]
            if self._advance():  # the last steps of a peer may have come just before its end
                return
            has_ended = [descriptor in ended for descriptor in self._pidfds]
            for peer in waited_for:
                if peer is None or peer == self._rank:
                    continue
                lost = _find_lost(self._peers_of(peer), has_left, has_ended, is_late=is_late)
                if lost is not None:
                    self._memory.fail(lost.reason, lost.peer)

    def _peers_of(self, waits_for: int) -> list[int]:
        """Who a call waits for: one peer, or whichever of all sends first."""
        return (
            [peer for peer in range(self._memory.size) if peer != self._rank] if waits_for == codes.ANY else [waits_for]
        )


def _find_lost(
    peers: Sequence[int], has_left: Sequence[bool], has_ended: Sequence[bool], *, is_late: bool
) -> Outcome | None:
    """Why none of the peers will take the step that is waited for: one died, all have left, or the time is over."""
    present = [peer for peer in peers if not has_left[peer]]
    died = [peer for peer in present if has_ended[peer]]
    if died:
        return Outcome(Reason.DIED, died[0])
    if peers and not present:
        return Outcome(Reason.LEFT, peers[-1])
    return Outcome(Reason.SILENT, present[0]) if is_late and present else None
