"""A thread beside the script that looks, while this rank waits, at where the others are.

    this rank waits for a second    it posts its report in the run's store, and reads those of the others
    ranks are out of step           the first to see it writes that down, and all that wait end with the same text

Nothing is sent and nothing is read while ranks do not wait, and one that computes for hours is none that waits.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
from contextlib import suppress
from typing import final

from weft.distributed.group.liveness import Store
from weft.distributed.script.world.out_of_step import find_out_of_step, tell_failed, tell_stuck
from weft.distributed.script.world.whereabouts import Note, RankReport, RankState, Whereabouts
from weft.errors import OutOfStepError, PeerLostError

__all__ = ["Board", "Watchdog"]

TICK_SECONDS = 0.25
PATIENCE_SECONDS = 1.0
# A server may work for long at what all ranks wait for: only the end of all movement tells.
STUCK_SECONDS = 120.0
# How long a rank has to leave its call when what it waits in was closed; then by an error; then its process is ended.
CLOSING_SECONDS = 2.0
GRACE_SECONDS = 4.0
LINGER_SECONDS = 3.0
POLL_SECONDS = 0.02
RANKS_PER_TICK = 64  # whose reports are read without pause


@final
class Board:
    """Reports of all ranks, and the finding that ends the run, in a store that all of them reach."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._known: set[int] = set()

    def post(self, report: RankReport) -> None:
        self._store.set(f"report/{self.rank}", report.encode())

    def read(self) -> dict[int, RankReport]:
        """Those that have been posted."""
        missing = [rank for rank in range(self.size) if rank not in self._known]
        self._known |= {rank for rank in missing if self._store.check([f"report/{rank}"])}
        ranks = sorted(self._known)
        texts = self._store.multi_get([f"report/{rank}" for rank in ranks]) if ranks else []
        return {rank: RankReport.decode(text.decode()) for rank, text in zip(ranks, texts, strict=True)}

    def find(self) -> str | None:
        """The finding, if there is one."""
        return self._store.get("finding").decode() if self._store.check(["finding"]) else None

    def settle(self, finding: str) -> str:
        """The first finding of all ranks, which this one may be."""
        return self._store.compare_set("finding", "", finding).decode()


@final
class Watchdog:
    """Watches one rank for as long as its process lives; started by `start`."""

    def __init__(self, whereabouts: Whereabouts, board: Board) -> None:
        self._whereabouts, self._board = whereabouts, board
        self._lock = threading.Lock()  # over the board, which the rank itself uses when a call has failed
        self._process, self._script_thread = os.getpid(), threading.current_thread()
        self._has_left = False
        self._posted: Note | None = None
        self._thread = threading.Thread(target=self._run, name=f"weft-watchdog-{board.rank}", daemon=True)
        self.finding: str | None = None

    def start(self) -> None:
        self._post("works")
        atexit.register(self.leave)
        self._thread.start()

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls. Safe to call twice."""
        if self._has_left or os.getpid() != self._process:
            return
        self._has_left = True
        error = getattr(sys, "last_value", None)  # what Python, or whoever runs the script, has shown
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            self._post("failed" if error else "ended", _in_one_line(error) if error else "")
            if self._board.rank == 0 and not isinstance(error, PeerLostError):
                self._linger()

    def explain(self, error: Exception) -> Exception:
        """For a call that failed: why ranks are out of step, or which of them failed, or else the error as it was."""
        if self.finding is None:
            with suppress(RuntimeError):
                self._post("waits")
                self._look_for(error)
        if self.finding is not None:
            return OutOfStepError(self.finding)
        return self._explain_loss(error) if isinstance(error, PeerLostError) else error

    def _look_for(self, error: Exception) -> None:
        """A rank that has left has told so first; that calls did not match is known to all, who are on their way."""
        deadline = time.monotonic() + (0 if isinstance(error, PeerLostError) else 2 * PATIENCE_SECONDS)
        while not self._look() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _explain_loss(self, error: PeerLostError) -> Exception:
        with suppress(RuntimeError), self._lock:
            report = self._board.read().get(error.peer)
            if report is not None and report.state == "failed":
                own = self._whereabouts.report(self._board.rank, "waits")
                return PeerLostError(tell_failed(report, own), error.peer)
        return error

    def _post(self, state: RankState, error: str = "") -> None:
        report = self._whereabouts.report(self._board.rank, state, error)
        with self._lock:
            self._board.post(report)

    def _look(self) -> bool:
        """Whether ranks are known to be out of step."""
        with self._lock:
            if self.finding is None:
                self.finding = self._board.find()
            if self.finding is None and (text := find_out_of_step(self._board.read())):
                self.finding = self._board.settle(text)
        return self.finding is not None

    def _linger(self) -> None:
        """The first rank may keep the store: let the others read what it has told."""
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                reports = self._board.read()
            if all(report.state in ("ended", "failed") for report in reports.values()):
                return
            time.sleep(POLL_SECONDS)

    # The thread.

    def _run(self) -> None:
        with suppress(RuntimeError):
            while self.finding is None and not self._has_left:
                note = self._await_waiting()
                if note is not None:
                    self._watch(note)
        if self.finding is not None:
            self._break_off()

    def _await_waiting(self) -> Note | None:
        """The call that this rank has been waiting in for a while; None where it is another one by now."""
        note, begun = self._whereabouts.waits_in, time.monotonic()
        while time.monotonic() - begun < PATIENCE_SECONDS:
            time.sleep(TICK_SECONDS)
            if not self._script_thread.is_alive():  # other threads, of the script or of Weft, are all that is left
                self.leave()
            if note is None or self._whereabouts.waits_in is not note:
                return None
        return note

    def _watch(self, note: Note) -> None:
        """Until this rank goes on, or ranks are known to be out of step."""
        self._post("waits")
        before: dict[int, RankReport] = {}
        since = time.monotonic()
        while self._whereabouts.waits_in is note and not self._look():
            with self._lock:
                reports = self._board.read()
            if reports != before:
                before, since = reports, time.monotonic()
            elif time.monotonic() - since > STUCK_SECONDS and (text := tell_stuck(reports, self._board.size)):
                with self._lock:
                    self.finding = self._board.settle(text)
            time.sleep(TICK_SECONDS * max(1, self._board.size // RANKS_PER_TICK))
        if self.finding is None and not self._has_left:
            self._post("works")

    def _break_off(self) -> None:
        """Get this rank out of the call that it waits in: by closing what it waits for, else by an error that Python
        raises in it, else by the end of the process."""
        note = self._whereabouts.waits_in
        if note is None:
            return
        if note[-1] is not None:
            threading.Thread(target=note[-1].close, name="weft-break-off", daemon=True).start()
        begun, is_raised = time.monotonic(), False
        while self._whereabouts.waits_in is note:
            waited = time.monotonic() - begun
            if waited > GRACE_SECONDS:
                print(f"weft: {self.finding}", file=sys.stderr, flush=True)
                os._exit(OutOfStepError.exit_code)
            if waited > CLOSING_SECONDS and not is_raised:
                is_raised = True
                thread = ctypes.c_ulong(self._script_thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfStepError))
            time.sleep(POLL_SECONDS)


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
