"""Who is still there: signs of life beside the transport, for transports that cannot name a lost peer.

Every rank keeps one sign in a store that all can reach: its process, and how far it has come. A thread looks at all
signs several times a second. Peers on this host are known by their process, others by a sign that keeps changing.
The first rank to find a peer lost writes the verdict, and all others take it over: all name the same peer.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, final
from weakref import WeakKeyDictionary

from weft.errors import PeerLostError

__all__ = ["Pending", "Sign", "Store", "Watch", "find_left", "find_silent", "name_host"]

TICK_SECONDS = 0.2
# How long a rank that closes waits for the others, so that what it sent last, and its store, outlive their last call.
LINGER_SECONDS = 2.0
NEAR_SECONDS = 5.0
POLL_SECONDS = 0.002


class Store(Protocol):
    """What is needed of the stores of torch.distributed, whose type stubs are incomplete."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def clone(self) -> "Store": ...


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rank lets the others know of itself."""

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
    def decode(text: str) -> "Sign":
        host, pid, num_collectives, is_waiting, is_closed, beat = text.split(" ")
        return Sign(host, int(pid), int(num_collectives), is_waiting == "1", is_closed == "1", int(beat))


@dataclass(frozen=True, slots=True)
class Pending:
    """A call under way: the number of a collective, counted from 1, or the peer of a message."""

    collective: int = 0
    peer: int = -1


def find_left(signs: Sequence[Sign], pending: Sequence[Pending]) -> int | None:
    """The first rank that has left the group, while a call is under way that needs it."""
    for rank, sign in enumerate(signs):
        if sign.is_closed and any(p.peer == rank or p.collective > sign.num_collectives for p in pending):
            return rank
    return None


def find_silent(signs: Sequence[Sign], rank: int, call: Pending) -> int:
    """The peer to blame for a call that took too long: one that has not come as far, or does not wait for anybody."""
    others = [other for other in range(len(signs)) if other != rank]
    behind = [other for other in others if signs[other].num_collectives < call.collective]
    if behind:
        return min(behind, key=lambda other: signs[other].num_collectives)
    idle = [other for other in others if not signs[other].is_waiting]
    if call.peer in others and (call.peer in idle or not idle):
        return call.peer
    return (idle or others)[0]


@final
class Watch:
    """Keeps this rank's sign, watches those of the others, and calls `on_lost` (from its own thread) once at most."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float, on_lost: Callable[[int], None]) -> None:
        self._store, self._rank, self._size = store.clone(), rank, size
        self._timeout, self._on_lost = timeout, on_lost
        self._lock = threading.Lock()  # over the own sign and the calls under way
        self._look_lock = threading.Lock()  # one look at a time, from the thread or from a failed call
        self._pending: WeakKeyDictionary[object, Pending] = WeakKeyDictionary()
        self._verdict: PeerLostError | None = None
        self._sign = Sign(name_host(), os.getpid())
        self._published = ""
        self._signs = [self._sign] * size
        self._changed = [time.monotonic()] * size
        self._publish()
        self._wait_for_signs()
        self._refresh()
        self._has_far_peers = any(sign.host != self._sign.host for sign in self._signs)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weft-watch-{rank}", daemon=True)
        self._thread.start()

    def begin(self, work: object, *, peer: int | None = None) -> None:
        """Note that `work` is under way: a message with `peer`, or the next collective."""
        with self._lock:
            if peer is None:
                self._sign = replace(self._sign, num_collectives=self._sign.num_collectives + 1)
            self._pending[work] = Pending(self._sign.num_collectives) if peer is None else Pending(peer=peer)

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
        return self._verdict is not None

    def check(self) -> None:
        """Raise PeerLostError if a peer is known to be lost."""
        if self._verdict is not None:
            raise PeerLostError(str(self._verdict), self._verdict.peer)

    def explain(self, work: object, *, was_timeout: bool) -> None:
        """Raise PeerLostError for a call that the transport gave up, as soon as it is known which peer is lost."""
        with self._lock:
            call = self._pending.get(work, Pending())
        # The end of a process on this host is seen at once; that of a far one takes its time.
        patience = self._timeout if self._has_far_peers else min(self._timeout, NEAR_SECONDS)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            self._look()
            if was_timeout and self._verdict is None:
                silent = find_silent(self._signs, self._rank, call)
                self._decide(silent, f"silent for more than {self._timeout:g} s")
            self.check()
            time.sleep(TICK_SECONDS / 4)

    def close(self) -> None:
        """Tell the others, and wait a moment for them to close too. Safe to call twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        with suppress(RuntimeError):  # the store may be gone with the rank that kept it
            with self._lock:
                self._sign = replace(self._sign, is_closed=True, is_waiting=False)
            self._publish()
            self._linger()

    def _wait_for_signs(self) -> None:
        deadline = time.monotonic() + self._timeout
        for rank in range(self._size):
            while not self._store.check([f"sign/{rank}"]):
                if time.monotonic() > deadline:
                    text = (
                        f"rank {rank} of {self._size} did not come within {self._timeout:g} s; look at its own output"
                    )
                    raise PeerLostError(text, rank)
                time.sleep(POLL_SECONDS)

    def _linger(self) -> None:
        lost = self._verdict.peer if self._verdict else -1
        deadline = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < deadline:
            self._refresh()
            if all(rank == lost or self._is_gone(sign) for rank, sign in enumerate(self._signs)):
                return
            time.sleep(POLL_SECONDS)

    def _run(self) -> None:
        beat = 0
        before: frozenset[Pending] = frozenset()
        while not self._stop.wait(TICK_SECONDS) and self._verdict is None:
            beat += self._has_far_peers
            with self._lock:
                now = frozenset(self._pending.values())
                self._sign = replace(self._sign, is_waiting=bool(now), beat=beat)
            # A call is doubted when it was under way one tick ago already: its end may be on its way to us.
            self._look(sorted(before & now, key=lambda p: (p.collective, p.peer)))
            before = now
        if self._verdict is not None:
            self._on_lost(self._verdict.peer)

    def _look(self, doubted: Sequence[Pending] = ()) -> None:
        """Publish the own sign, read all others, and settle on a verdict where one is due."""
        with self._look_lock:
            try:
                self._publish()
                self._refresh()
                self._judge(doubted)
            except RuntimeError:
                # The store went with the rank that kept it, the first.
                if not self._signs[0].is_closed:
                    self._adopt("0 its store cannot be reached")

    def _judge(self, doubted: Sequence[Pending]) -> None:
        if self._store.check(["verdict"]):
            self._adopt(self._store.get("verdict").decode())
        elif (dead := self._find_dead()) is not None:
            self._decide(dead, "its process has ended, or gives no sign of life")
        elif (left := find_left(self._signs, doubted)) is not None:
            self._decide(left, "it has left the group")

    def _find_dead(self) -> int | None:
        for rank, sign in enumerate(self._signs):
            if rank != self._rank and not sign.is_closed and (self._is_gone(sign) or self._is_quiet(rank)):
                return rank
        return None

    def _is_gone(self, sign: Sign) -> bool:
        return sign.is_closed or (sign.host == self._sign.host and not _is_alive(sign.pid))

    def _is_quiet(self, rank: int) -> bool:
        is_far = self._signs[rank].host != self._sign.host
        return is_far and time.monotonic() - self._changed[rank] > self._timeout / 2

    def _decide(self, peer: int, reason: str) -> None:
        self._adopt(self._store.compare_set("verdict", "", f"{peer} {reason}").decode())

    def _adopt(self, verdict: str) -> None:
        peer, _, reason = verdict.partition(" ")
        text = f"rank {peer} of {self._size} is lost: {reason} (seen by: rank {self._rank}); look at its own output"
        self._verdict = PeerLostError(text, int(peer))

    def _publish(self) -> None:
        text = self._sign.encode()
        if text != self._published:
            self._store.set(f"sign/{self._rank}", text)
            self._published = text

    def _refresh(self) -> None:
        texts = self._store.multi_get([f"sign/{rank}" for rank in range(self._size)])
        signs = [Sign.decode(text.decode()) for text in texts]
        now = time.monotonic()
        news = zip(self._changed, self._signs, signs, strict=True)
        self._changed = [changed if old == new else now for changed, old, new in news]
        self._signs = signs


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
