"""The files in which a run at its own pace records what decided it: JSON lines behind a head that names their format.

RUN/decisions/seed-0/shard-0.jsonl      {"format": 1, "plan": "data=4 ...", ...}
                                        ["release", 0, 0, 0, 0]
                                        ...
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import CorruptFileError, RunFolderError, StorageError

__all__ = ["FOLDER", "FORMAT", "line_of", "read_after_head", "read_lines", "record_file", "storing"]

FORMAT = 1
FOLDER = "decisions"


def record_file(run: Path, seed: int, name: str) -> Path:
    return run / FOLDER / f"seed-{seed}" / f"{name}.jsonl"


def line_of(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def read_lines(path: Path, subject: str) -> Iterator[Any]:
    """Every whole line; one that a crash cut off is left out. The subject is what the record would be of."""
    try:
        whole, _, _torn = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        raise RunFolderError(f"run has no record of {subject} ({path}); replay one that has") from None
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise CorruptFileError(f"record of decisions has a bad line ({path}:{number}: {error})") from None


def read_after_head(path: Path, subject: str, *, begun: str) -> Iterator[Any]:
    """The lines of a run that can be repeated.

    Args:
        begun: the key of the head that says how far the run had come before: a resumed run's record is not whole.
    """
    lines = read_lines(path, subject)
    head = next(lines, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CorruptFileError(f"file is no record of decisions of this version ({path}); replay another run")
    if head.get(begun):
        raise RunFolderError(f"run was resumed, and its record is only of what came after ({path}); replay another")
    return lines


@contextmanager
def storing(path: Path, trouble: str) -> Iterator[None]:
    """Turns trouble with the disk, in these words, into StorageError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{trouble} ({path}: {reason}); free space") from error
