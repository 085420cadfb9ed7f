"""Notes that the launchers of several hosts leave for each other, in a store at the address where they meet.

    host 0: launcher keeps the store ---- host/0  {"launch": ..., "phase": "running", "beat": 7, "failures": []}
    host 1: launcher                 ---- host/1  {"launch": ..., "phase": "ended",   "beat": 6, "failures": [...]}

Each writes its own note and reads all. A launcher that is gone, or cannot be reached, is known by a note that stands
still. The ranks find each other through the same store, as those of torchrun do through its agent's.
"""

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, final

from weft.engines.failure import Failure
from weft.errors import UsageError

__all__ = ["POLL_SECONDS", "HostNotes", "Note", "Phase", "RankFailure", "Rendezvous", "meet"]

TICK_SECONDS = 0.2
POLL_SECONDS = 0.05
# A launcher whose note stands still for so long is lost. Ranks that compute may keep it waiting for a core.
SILENCE_SECONDS = 60.0
CONNECT_SECONDS = 1.0
OPERATION_SECONDS = 10.0

Phase = Literal["running", "ended", "left"]


@dataclass(frozen=True)
class Rendezvous:
    """Where the hosts of a launch meet, and which of them this one is.

    Args:
        address: of host 0, as all hosts reach it.
        timeout: seconds in which all must have come.
    """

    address: str
    port: int
    host_rank: int
    num_hosts: int
    timeout: float = 300.0

    @staticmethod
    def parse(text: str, host_rank: int, num_hosts: int, timeout: float = 300.0) -> "Rendezvous":
        """
        >>> Rendezvous.parse("10.0.0.1:29500", 1, 2)
        Rendezvous(address='10.0.0.1', port=29500, host_rank=1, num_hosts=2, timeout=300.0)

        Raises:
            UsageError: the text is no address and port, or there is no such host.
        """
        address, _, port = text.rpartition(":")
        if not address or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"rendezvous is not an address and a port ({text}); write it as 10.0.0.1:29500")
        if not 0 <= host_rank < num_hosts:
            cure = "count hosts from 0"
            raise UsageError(f"there is no such host (--host-rank: {host_rank}, --num-hosts: {num_hosts}); {cure}")
        return Rendezvous(address, int(port), host_rank, num_hosts, timeout)

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class RankFailure:
    """How a rank failed; `told` is its own account, if it could give one."""

    rank: int
    code: int
    moment: float
    told: Failure | None = None


@dataclass(frozen=True)
class Note:
    """The state of a host, as its launcher tells it to the others.

    Args:
        launch: what must be the same on all hosts, in words.
        beat: changes while the launcher lives.
    """

    launch: str
    phase: Phase = "running"
    beat: int = 0
    failures: tuple[RankFailure, ...] = field(default=())

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> "Note":
        data = json.loads(text)
        failures = tuple(
            RankFailure(**{**found, "told": found["told"] and Failure.from_json(found["told"])})
            for found in data["failures"]
        )
        return Note(**{**data, "failures": failures})


def meet(rendezvous: Rendezvous, launch: str) -> "HostNotes":
    """Wait for the launchers of all hosts. A collective call of theirs.

    Raises:
        UsageError: a host did not come in time, has been there already, or was started with another command.
    """
    deadline = time.monotonic() + rendezvous.timeout
    store = _keep_store(rendezvous) if rendezvous.host_rank == 0 else _reach_store(rendezvous, deadline)
    if int(store.add(f"came/{rendezvous.host_rank}", 1)) > 1:
        cure = "give each host a number of its own"
        raise UsageError(f"another host has the same number (--host-rank: {rendezvous.host_rank}); {cure}")
    own = Note(launch)
    store.set(_key(rendezvous.host_rank), own.encode())
    while missing := [host for host in range(rendezvous.num_hosts) if not store.check([_key(host)])]:
        if time.monotonic() > deadline:
            raise UsageError(_tell_missing(rendezvous, missing))
        time.sleep(POLL_SECONDS)
    notes = _read(store, rendezvous.num_hosts)
    for host, note in enumerate(notes):
        if note.launch != launch:
            about = f"host {rendezvous.host_rank}: {launch}; host {host}: {note.launch}"
            raise UsageError(f"hosts were started differently ({about}); give the same command on each")
    return HostNotes(store, rendezvous, own, notes)


def _tell_missing(rendezvous: Rendezvous, missing: Sequence[int]) -> str:
    numbers = ", ".join(map(str, missing))
    came = f"came: {rendezvous.num_hosts - len(missing)} of {rendezvous.num_hosts}, missing: {numbers}"
    cure = f"start the same command there, with --host-rank {missing[0]}"
    return f"not all hosts came to {rendezvous} within {rendezvous.timeout:g} s ({came}); {cure}"


def _keep_store(rendezvous: Rendezvous) -> Any:
    import torch.distributed as distributed

    try:
        # Bound by hand to the one address: left to itself, the store listens on all interfaces.
        listener = socket.create_server((rendezvous.address, rendezvous.port), backlog=512)
    except OSError as error:
        cure = "give an address of host 0 and a free port"
        raise UsageError(f"host 0 cannot listen at {rendezvous} ({error.strerror}); {cure}") from None
    c10d: Any = distributed  # its type stubs lack the stores
    return c10d.TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=OPERATION_SECONDS),
    )


def _reach_store(rendezvous: Rendezvous, deadline: float) -> Any:
    """A plain connection is tried first: the store's own attempts cannot be interrupted, and fill the log."""
    import torch.distributed as distributed

    while True:
        try:
            socket.create_connection((rendezvous.address, rendezvous.port), CONNECT_SECONDS).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                about = f"{rendezvous}: {error.strerror or error}"
                cure = "start the same command on host 0, whose address this is"
                text = f"host 0 did not answer within {rendezvous.timeout:g} s ({about}); {cure}"
                raise UsageError(text) from None
            time.sleep(POLL_SECONDS)
    c10d: Any = distributed
    timeout = timedelta(seconds=OPERATION_SECONDS)
    return c10d.TCPStore(rendezvous.address, rendezvous.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _key(host: int) -> str:
    return f"host/{host}"


def _read(store: Any, num_hosts: int) -> list[Note]:
    return [Note.decode(text) for text in store.multi_get([_key(host) for host in range(num_hosts)])]


@final
class HostNotes:
    """The notes of all hosts, kept up to date by a thread: the network may keep a call waiting, and ranks of this host
    are looked after all the same."""

    def __init__(self, store: Any, rendezvous: Rendezvous, own: Note, notes: Sequence[Note]) -> None:
        self._store, self._rendezvous, self._own = store, rendezvous, own
        self._notes = list(notes)
        self._changed = [time.monotonic()] * len(notes)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-hosts", daemon=True)
        self._thread.start()

    def tell(self, phase: Phase, failures: Sequence[RankFailure] = ()) -> None:
        """Change the own note; the others read it soon."""
        with self._lock:
            self._own = replace(self._own, phase=phase, failures=tuple(failures))

    @property
    def failures(self) -> list[RankFailure]:
        """Of ranks of other hosts, as their launchers told."""
        others = [note for host, note in enumerate(self._notes) if host != self._rendezvous.host_rank]
        return [failure for note in others for failure in note.failures]

    def find_lost(self) -> tuple[int, str] | None:
        """A host that was running and of which nothing is heard any more, and how long, in words."""
        for host, (note, changed) in enumerate(zip(self._notes, self._changed, strict=True)):
            quiet = time.monotonic() - changed
            if host != self._rendezvous.host_rank and note.phase == "running" and quiet > SILENCE_SECONDS:
                return host, f"its launcher has given no sign of life for {SILENCE_SECONDS:g} s"
        return None

    def are_others_in(self, phases: Sequence[Phase]) -> bool:
        """Whether each of the other hosts is in one of these phases, as far as is known."""
        own = self._rendezvous.host_rank
        return all(note.phase in phases for host, note in enumerate(self._notes) if host != own)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(OPERATION_SECONDS)

    def _run(self) -> None:
        beat, is_last = 0, False
        while not is_last:
            is_last = self._stop.wait(TICK_SECONDS)
            beat += 1
            with self._lock:
                own = replace(self._own, beat=beat)
            with suppress(RuntimeError):  # the host that keeps the store is gone, or its network: notes stand still
                self._store.set(_key(self._rendezvous.host_rank), own.encode())
                self._take(_read(self._store, len(self._notes)))

    def _take(self, notes: Sequence[Note]) -> None:
        now = time.monotonic()
        for host, note in enumerate(notes):
            if note != self._notes[host]:
                self._notes[host], self._changed[host] = note, now
