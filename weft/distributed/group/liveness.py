"""Liveness of peers, for transports that cannot name a lost one: a heartbeat of every rank beside the transport.

Every rank keeps its heartbeat in a store that all can reach: its process, and how far it has come. A thread reads those
of all several times a second. Peers on this host are known by their process, others by a heartbeat that keeps changing.
The first rank to find a peer lost writes that down, and all others take it over: all name the same peer.
"""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final

from weft.errors import PeerLostError, UsageError

__all__ = ["Heartbeat", "LivenessMonitor", "PendingCall", "Store", "find_left", "find_silent", "name_host"]

TICK_SECONDS = 0.2
# How long a rank that closes waits for the others, so that what it sent last, and its store, outlive their last call.
LINGER_SECONDS = 2.0
NEAR_SECONDS = 5.0
# A process whose heartbeat stands still for so long is gone, however long a call may take.
QUIET_SECONDS = 150.0
POLL_SECONDS = 0.002


class Store(Protocol):
    """The methods used of the stores of torch.distributed, whose type stubs are incomplete."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def clone(self) -> "Store": ...


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A rank as the others see it: its process, how far it has come, whether it has left."""

    host: str
    pid: int
    num_collectives: int = 0  # started
    is_waiting: bool = False  # a call is under way
    is_closed: bool = False
    beat: int = 0

    def encode(self) -> str:
        numbers = (self.pid, self.num_collectives, int(self.is_waiting), int(self.is_closed), self.beat)
        return " ".join([self.host, *map(str, numbers)])

    @staticmethod
    def decode(text: str) -> "Heartbeat":
        host, pid, num_collectives, is_waiting, is_closed, beat = text.split(" ")
        return Heartbeat(host, int(pid), int(num_collectives), is_waiting == "1", is_closed == "1", int(beat))


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call under way: the number of a collective, counted from 1, or the peer of a message."""

    collective: int = 0
    peer: int = -1


def find_left(heartbeats: Sequence[Heartbeat], pending: Sequence[PendingCall]) -> int | None:
    """The first rank that has left the group, while a call is under way that needs it."""
    for rank, heartbeat in enumerate(heartbeats):
        if heartbeat.is_closed and any(p.peer == rank or p.collective > heartbeat.num_collectives for p in pending):
            return rank
    return None


def find_silent(heartbeats: Sequence[Heartbeat], rank: int, call: PendingCall) -> int:
    """The peer that made a call take too long: one that has not come as far, or does not wait for anybody."""
    others = [other for other in range(len(heartbeats)) if other != rank]
    behind = [other for other in others if heartbeats[other].num_collectives < call.collective]
    if behind:
        return min(behind, key=lambda other: heartbeats[other].num_collectives)
    idle = [other for other in others if not heartbeats[other].is_waiting]
    if call.peer in others and (call.peer in idle or not idle):
        return call.peer
    return (idle or others)[0]


@final
class LivenessMonitor:
    """Publishes this rank's heartbeat, reads the others', and calls `on_lost` (from its own thread) at most once.

    Args:
        timeout: seconds after which a rank that gives no sign of life, or keeps others waiting, counts as lost.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float, on_lost: Callable[[int], None]) -> None:
        self._store, self._rank, self._size = store.clone(), rank, size
        self._timeout, self._on_lost = timeout, on_lost
        self._lock = threading.Lock()  # over the own heartbeat and the calls under way
        self._look_lock = threading.Lock()  # one look at a time, from the thread or from a failed call
        self._pending: weakref.WeakKeyDictionary[object, PendingCall] = weakref.WeakKeyDictionary()
        self._loss: PeerLostError | None = None
        self._own = Heartbeat(name_host(), os.getpid())
        self._published = ""
        self._heartbeats = [self._own] * size
        self._changed = [time.monotonic()] * size
        self._publish()
        self._wait_for_heartbeats()
        self._refresh()
        self._has_far_peers = any(heartbeat.host != self._own.host for heartbeat in self._heartbeats)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-liveness-{rank}", daemon=True)
        self._thread.start()
        # A thread that is in a call of the store when Python ends is unwound through C++ that does not allow it, and
        # the process aborts.
        self._at_exit = weakref.finalize(self, _stop_thread, self._stop, self._thread)

    def begin(self, work: object, *, peer: int | None = None) -> None:
        """Note that `work` is under way: a message with `peer`, or the next collective."""
        with self._lock:
            if peer is None:
                self._own = replace(self._own, num_collectives=self._own.num_collectives + 1)
            self._pending[work] = PendingCall(self._own.num_collectives) if peer is None else PendingCall(peer=peer)

    def end(self, work: object) -> None:
        with self._lock:
            self._pending.pop(work, None)

    @property
    def is_waiting(self) -> bool:
        """Whether a call is under way."""
        with self._lock:
            return bool(self._pending)

    @property
    def has_lost(self) -> bool:
        """Whether a peer is known to be lost."""
        return self._loss is not None

    def check(self) -> None:
        """Raise PeerLostError if a peer is known to be lost."""
        if self._loss is not None:
            raise PeerLostError(str(self._loss), self._loss.peer)

    def check_open(self) -> None:
        """Raise UsageError if this rank has closed the group, maybe in another thread."""
        if self._stop.is_set():
            raise UsageError("the group was closed while a call was under way; wait for it before")

    def explain(self, work: object, *, was_timeout: bool) -> None:
        """Raise PeerLostError for a call that the transport gave up, as soon as it is known which peer is lost."""
        with self._lock:
            call = self._pending.get(work, PendingCall())
        # The end of a process on this host is seen at once; that of a far one takes its time.
        deadline = time.monotonic() + min(self._timeout, 2 * QUIET_SECONDS if self._has_far_peers else NEAR_SECONDS)
        while time.monotonic() < deadline and not self._stop.is_set():
            self._look()
            if was_timeout and self._loss is None:
                silent = find_silent(self._heartbeats, self._rank, call)
                self._decide(silent, f"silent for more than {self._timeout:g} s")
            self.check()
            time.sleep(TICK_SECONDS / 4)

    def close(self) -> None:
        """Tell the others, and wait a moment for them to close too. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._at_exit.detach()
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            with self._lock:
                self._own = replace(self._own, is_closed=True, is_waiting=False)
            self._publish()
            if not self.is_waiting:
                self._linger()

    def _wait_for_heartbeats(self) -> None:
        deadline = time.monotonic() + self._timeout
        for rank in range(self._size):
            while not self._store.check([f"heartbeat/{rank}"]):
                if time.monotonic() > deadline:
                    text = (
                        f"rank {rank} of {self._size} did not come within {self._timeout:g} s; look at its own output"
                    )
                    raise PeerLostError(text, rank)
                time.sleep(POLL_SECONDS)

    def _linger(self) -> None:
        lost = self._loss.peer if self._loss else -1
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            self._refresh()
            if all(rank == lost or self._is_gone(heartbeat) for rank, heartbeat in enumerate(self._heartbeats)):
                return
            time.sleep(POLL_SECONDS)

    def _run(self) -> None:
        beat = 0
        before: frozenset[PendingCall] = frozenset()
        while not self._stop.wait(TICK_SECONDS) and self._loss is None:
            beat += self._has_far_peers
            with self._lock:
                now = frozenset(self._pending.values())
                self._own = replace(self._own, is_waiting=bool(now), beat=beat)
            # A call is doubted when it was under way one tick ago already: its end may be on its way to us.
            self._look(sorted(before & now, key=lambda p: (p.collective, p.peer)))
            before = now
        if self._loss is not None:
            self._on_lost(self._loss.peer)

    def _look(self, doubted: Sequence[PendingCall] = ()) -> None:
        """Publish the own heartbeat, read all others, and note a loss where there is one."""
        with self._look_lock:
            try:
                self._publish()
                self._refresh()
                self._find_loss(doubted)
            except RuntimeError:
                # The store went with the rank that kept it, the first.
                if not self._heartbeats[0].is_closed:
                    self._adopt("0 its store cannot be reached")

    def _find_loss(self, doubted: Sequence[PendingCall]) -> None:
        if self._store.check(["loss"]):
            self._adopt(self._store.get("loss").decode())
        elif (dead := self._find_dead()) is not None:
            self._decide(dead, "its process has ended, or gives no sign of life")
        elif (left := find_left(self._heartbeats, doubted)) is not None:
            self._decide(left, "it has left the group")

    def _find_dead(self) -> int | None:
        for rank, heartbeat in enumerate(self._heartbeats):
            if rank != self._rank and not heartbeat.is_closed and (self._is_gone(heartbeat) or self._is_quiet(rank)):
                return rank
        return None

    def _is_gone(self, heartbeat: Heartbeat) -> bool:
        return heartbeat.is_closed or (heartbeat.host == self._own.host and not _is_alive(heartbeat.pid))

    def _is_quiet(self, rank: int) -> bool:
        is_far = self._heartbeats[rank].host != self._own.host
        return is_far and time.monotonic() - self._changed[rank] > min(self._timeout / 2, QUIET_SECONDS)

    def _decide(self, peer: int, reason: str) -> None:
        self._adopt(self._store.compare_set("loss", "", f"{peer} {reason}").decode())

    def _adopt(self, loss: str) -> None:
        peer, _, reason = loss.partition(" ")
        text = f"rank {peer} of {self._size} is lost: {reason} (seen by: rank {self._rank}); look at its own output"
        self._loss = PeerLostError(text, int(peer))

    def _publish(self) -> None:
        text = self._own.encode()
        if text != self._published:
            self._store.set(f"heartbeat/{self._rank}", text)
            self._published = text

    def _refresh(self) -> None:
        texts = self._store.multi_get([f"heartbeat/{rank}" for rank in range(self._size)])
        heartbeats = [Heartbeat.decode(text.decode()) for text in texts]
        now = time.monotonic()
        news = zip(self._changed, self._heartbeats, heartbeats, strict=True)
        self._changed = [changed if old == new else now for changed, old, new in news]
        self._heartbeats = heartbeats


def _stop_thread(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    thread.join(LINGER_SECONDS)


def name_host() -> str:
    """The same for processes that know each other by number: one boot of a kernel, one space of process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _is_alive(pid: int) -> bool:
    """Whether the process exists and has not ended (one that nobody has waited for yet has)."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # not ours to signal, or no /proc here
        return True
    return state not in "ZX"
