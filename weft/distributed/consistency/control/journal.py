"""The journals of a run at its own pace: what decided it, as JSON lines behind a head that names their format.

RUN/decisions/seed-0/shard-0.jsonl      of a shard; host-0.jsonl of a host server, rank-0.jsonl of a gossiping rank
  {"format": 1, "plan": "data=4 ...", "workers": 4, "shard": 0, "seed": 0, "updates": 0}
  ["release", 0, 0, 0, 0]               a decision or event: the name of its class, and its fields as numbers
  ["commit", [0, 0]]
  ...
  {"updates": 1520, "staleness": [1, 3, 9], "dropped": 0, "refused": {}}        of servers, at the end
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, TypeVar, final, get_args, get_origin

from weft.errors import CorruptFileError, RunFolderError, StorageError

__all__ = ["FLUSH_SECONDS", "Journal", "decode", "encode", "journal_file", "read_events", "read_lines"]

FORMAT = 1
FOLDER = "decisions"
FLUSH_SECONDS = 1.0
"""Of journals that servers keep."""

Event = TypeVar("Event")


def journal_file(run: Path, seed: int, name: str) -> Path:
    return run / FOLDER / f"seed-{seed}" / f"{name}.jsonl"


@final
class Journal:
    """Appends events to a file. Whoever notes holds the lock of what the event changed.

    Args:
        path: None to write nothing.
        about: what the head says of the run.
        restored: the version from which a server goes on that takes the place of one that was lost, in its file.
        flush_seconds: from one moment at which lines reach the operating system to the next. With 0 each does before
            anybody can learn of what it says: what a killed rank did is known.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, Any],
        *,
        restored: int | None = None,
        flush_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._flushed_at = clock()
        self._file: TextIO | None = None
        if path is None:
            return
        with self._storing():
            path.parent.mkdir(parents=True, exist_ok=True)
            if restored is not None and path.exists():
                before = path.read_bytes()
                path.write_bytes(before[: before.rfind(b"\n") + 1])  # without a line that was cut off
            self._file = path.open("w" if restored is None else "a", encoding="utf-8")
        self._write({"format": FORMAT, **about} if restored is None else {"restored": restored})
        self._file.flush()

    def note(self, event: object) -> None:
        if self._file is not None:
            self._write(encode(event))

    def end(self, summary: object) -> None:
        """The run came to its end, with this summary."""
        if self._file is not None and not self._file.closed:
            self._write(vars(summary))
        self.close()

    def close(self) -> None:
        if self._file is not None:
            with self._storing():
                self._file.close()

    def _write(self, line: Any) -> None:
        assert self._file is not None, "there is a path"
        with self._storing():
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            if self._clock() - self._flushed_at >= self._flush_seconds:
                self._file.flush()
                self._flushed_at = self._clock()

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"decisions could not be written ({self._path}: {reason}); free space") from error


def read_lines(path: Path, subject: str) -> Iterator[Any]:
    """Every whole line; one that a crash cut off is left out.

    Args:
        subject: what the journal would be of.
    """
    try:
        whole, _, _torn = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        raise RunFolderError(f"run has no record of {subject} ({path}); replay one that has") from None
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise CorruptFileError(f"record of decisions has a bad line ({path}:{number}: {error})") from None


def read_events(path: Path, subject: str, kinds: Iterable[type[Event]], *, begun: str) -> list[Event]:
    """The events of a run that can be repeated.

    Args:
        kinds: the classes of events that may be there.
        begun: the key of the head that says how far the run had come before: a resumed run's journal is not whole.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    lines = read_lines(path, subject)
    head = next(lines, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CorruptFileError(f"file is no record of decisions of this version ({path}); replay another run")
    if head.get(begun):
        raise RunFolderError(f"run was resumed, and its record is only of what came after ({path}); replay another")
    events = []
    for line in lines:
        if isinstance(line, dict) and "restored" in line:
            raise RunFolderError(f"run lost a server on the way, and cannot be repeated ({path}); replay another")
        if not isinstance(line, dict):
            events.append(decode(line, kinds))
    return events


def encode(event: object) -> list[Any]:
    """The name of the event's class and its fields; a field that is a tuple comes last, and is spread out."""
    values: list[Any] = []
    for value in vars(event).values():
        if isinstance(value, tuple):
            values += [list(item) if isinstance(item, tuple) else item for item in value]
        else:
            values.append(-1 if value is None else int(value) if isinstance(value, bool) else value)
    return [type(event).__name__.lower(), *values]


def decode(line: Any, kinds: Iterable[type[Event]]) -> Event:
    """The inverse of `encode`, for events of these classes. Raises CorruptFileError for anything else."""
    name, *values = line if isinstance(line, list) and line else [None]
    for kind in kinds:
        if kind.__name__.lower() == name and (found := _arguments(kind, values)) is not None:
            return kind(*found)
    raise CorruptFileError(f"decision cannot be read ({line!r}); the file was changed, or is of a newer version")


def _arguments(kind: type[Any], values: list[Any]) -> list[Any] | None:
    """The fields of an event, from the values in a line; None where these do not fit."""
    arguments: list[Any] = []
    for field in fields(kind):
        if get_origin(field.type) is tuple:
            item = get_args(field.type)[0]
            if item is not int and (not values or not all(_are_ints(value, len(get_args(item))) for value in values)):
                return None
            if item is int and not _are_ints(values, len(values)):
                return None
            arguments.append(tuple(value if item is int else tuple(value) for value in values))
            values = []
        else:
            value, *values = values or [None]
            if not (type(value) is int if field.type in (int, bool, int | None) else value in get_args(field.type)):
                return None
            is_missing = field.type == int | None and value < 0
            arguments.append(bool(value) if field.type is bool else None if is_missing else value)
    return None if values else arguments


def _are_ints(values: Any, length: int) -> bool:
    return isinstance(values, list) and len(values) == length and all(type(value) is int for value in values)
