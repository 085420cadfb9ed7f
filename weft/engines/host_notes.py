"""Notes that the launchers of several hosts leave for each other, in a store at the address where they meet.

    host 0: launcher keeps the store ---- host/0  {"launch": ..., "phase": "running", "beat": 7, "failures": []}
    host 1: launcher                 ---- host/1  {"launch": ..., "phase": "ended",   "beat": 6, "failures": [...]}

Each writes its own note and reads all. A launcher that is gone, or cannot be reached, is known by a note that stands
still. The ranks find each other through the same store, as those of torchrun do through its agent's.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, final

from weft.engines.failure import Failure
from weft.engines.rendezvous import OPERATION_SECONDS, POLL_SECONDS, Rendezvous, keep_store, reach_store, use_told_loss
from weft.errors import UsageError

__all__ = ["HostNotes", "Note", "Phase", "RankFailure", "meet"]

TICK_SECONDS = 0.2
# A launcher whose note stands still for so long is lost. Ranks that compute may keep it waiting for a core.
SILENCE_SECONDS = 60.0
# How long host 0 keeps the store for others to read why the run does not begin.
PART_SECONDS = 5.0

# A key that is there once host 0 knows that the run does not begin.
OVER = "over"

Phase = Literal["running", "ended", "left"]


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
        UsageError: a host did not come in time, has been there already, or was started with another command; or what
            answers is no launcher, or one that ends.
    """
    deadline = time.monotonic() + rendezvous.timeout
    store = keep_store(rendezvous) if rendezvous.host_rank == 0 else reach_store(rendezvous, deadline)
    with use_told_loss(rendezvous):
        if int(store.add(f"came/{rendezvous.host_rank}", 1)) > 1:
            cure = "give each host a number of its own"
            raise UsageError(f"another host has the same number (--host-rank: {rendezvous.host_rank}); {cure}")
        own = Note(launch)
        store.set(_key(rendezvous.host_rank), own.encode())
        try:
            notes = _await_notes(store, rendezvous, deadline)
        except UsageError:
            with suppress(RuntimeError):  # the store is gone: nobody asks any more
                _part(store, rendezvous)
            raise
    return HostNotes(store, rendezvous, own, notes)


def _await_notes(store: Any, rendezvous: Rendezvous, deadline: float) -> list[Note]:
    hosts = range(rendezvous.num_hosts)
    while missing := _find_missing(store, map(_key, hosts)):
        if time.monotonic() > deadline or store.check([OVER]):
            # Hosts that were told different numbers of hosts would name one that is missing nowhere else.
            _check_same(_read(store, [host for host in hosts if host not in missing]), rendezvous.host_rank)
            raise UsageError(_tell_missing(rendezvous, missing))
        time.sleep(POLL_SECONDS)
    notes = _read(store, hosts)
    _check_same(notes, rendezvous.host_rank)
    return list(notes.values())


def _check_same(notes: Mapping[int, Note], own: int) -> None:
    for host, note in notes.items():
        if note.launch != notes[own].launch:
            about = f"host {own}: {notes[own].launch}; host {host}: {note.launch}"
            raise UsageError(f"hosts were started differently ({about}); give the same command on each")


def _part(store: Any, rendezvous: Rendezvous) -> None:
    """Leave before the run begins. Host 0 tells the others, and keeps the store until those that came have read why."""
    store.set(_parted(rendezvous.host_rank), "")
    if rendezvous.host_rank == 0:
        store.set(OVER, "")
        deadline = time.monotonic() + PART_SECONDS
        missing = _find_missing(store, map(_key, range(rendezvous.num_hosts)))
        came = [_parted(host) for host in range(rendezvous.num_hosts) if host not in missing]
        while _find_missing(store, came) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _find_missing(store: Any, keys: Iterable[str]) -> list[int]:
    """Which of the keys are not there, by their places."""
    return [place for place, key in enumerate(keys) if not store.check([key])]


def _tell_missing(rendezvous: Rendezvous, missing: Sequence[int]) -> str:
    numbers = ", ".join(map(str, missing))
    came = f"came: {rendezvous.num_hosts - len(missing)} of {rendezvous.num_hosts}, missing: {numbers}"
    cure = f"start the same command there, with --host-rank {missing[0]}"
    return f"not all hosts came to {rendezvous} within {rendezvous.timeout:g} s ({came}); {cure}"


def _key(host: int) -> str:
    return f"host/{host}"


def _parted(host: int) -> str:
    return f"parted/{host}"


def _read(store: Any, hosts: Sequence[int]) -> dict[int, Note]:
    texts = store.multi_get([_key(host) for host in hosts])
    return {host: Note.decode(text) for host, text in zip(hosts, texts, strict=True)}


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
                self._take(_read(self._store, range(len(self._notes))))

    def _take(self, notes: Mapping[int, Note]) -> None:
        now = time.monotonic()
        for host, note in notes.items():
            if note != self._notes[host]:
                self._notes[host], self._changed[host] = note, now
