"""A run folder: `record.json`, `log.jsonl` and `checkpoint/`."""

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from weft.errors import CorruptFileError, RunFolderError, StorageError
from weft.records.record_file import RECORD_NAME
from weft.records.strict_json import decode_json, encode_json, parse_json

__all__ = ["RunFolder", "create_run_folder", "open_run_folder", "use_alone"]


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it makes. It is a run folder from its first `record.json` on."""

    path: Path

    @property
    def record_file(self) -> Path:
        return self.path / RECORD_NAME

    @property
    def log_file(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def discard(self) -> None:
        """Remove a run that never began. A folder that holds anything else stays."""
        self.record_file.unlink(missing_ok=True)
        self.log_file.unlink(missing_ok=True)
        if self.path.is_dir() and next(self.path.iterdir(), None) is None:
            self.path.rmdir()

    def append_log(self, entry: Mapping[str, Any]) -> None:
        """Add one line to the log. Only one process of a run may do so."""
        line = json.dumps(encode_json(entry), allow_nan=False) + "\n"
        try:
            with self.log_file.open("ab+") as log:
                _drop_torn_line(log)
                log.write(line.encode())
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(
                f"log could not be written ({self.log_file}: {reason}); free space or choose another --out"
            ) from error

    def read_log(self) -> list[dict[str, Any]]:
        """Every whole line of the log, oldest first; a last line that a crash cut off is left out."""
        if not self.log_file.exists():
            return []
        whole, _, _torn = self.log_file.read_bytes().rpartition(b"\n")
        return [self._parse(line, number) for number, line in enumerate(whole.splitlines(), start=1)]

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = decode_json(parse_json(line.decode()))
        except ValueError as error:
            raise CorruptFileError(f"log has a bad line ({self.log_file}:{number}: {error}); remove the line") from None
        if not isinstance(entry, dict):
            raise CorruptFileError(f"log has a line that is no object ({self.log_file}:{number}); remove the line")
        return entry


def create_run_folder(path: Path | None, name: str, root: Path = Path("runs")) -> RunFolder:
    """A new, empty run folder at `path`, or at `root/<name>-<UTC time>-<suffix>` when no path is given.

    Raises:
        RunFolderError: there is something at the path already.
        StorageError: the folder could not be made.
    """
    path = root / _fresh_name(name) if path is None else path
    try:
        path.mkdir(parents=True, exist_ok=True)
        is_empty = next(path.iterdir(), None) is None
    except (FileExistsError, NotADirectoryError):
        raise RunFolderError(f"a file is in the way of the run folder ({path}); choose another --out") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"run folder could not be made ({path}: {reason}); choose another --out") from error
    if (path / RECORD_NAME).exists():
        raise RunFolderError(
            f"folder holds a run already ({path}); continue with --resume {path} or choose another --out"
        )
    if not is_empty:
        raise RunFolderError(f"folder is not empty and holds no run ({path}); choose another --out")
    return RunFolder(path)


def open_run_folder(path: Path) -> RunFolder:
    """The run folder that is at `path`.

    Raises:
        RunFolderError: there is none.
    """
    if not path.is_dir():
        raise RunFolderError(f"no such run folder ({path}); give a folder that `weft run` made")
    if not (path / RECORD_NAME).is_file():
        raise RunFolderError(f"not a run folder, for it has no {RECORD_NAME} ({path}); give one that `weft run` made")
    return RunFolder(path)


@contextmanager
def use_alone(folder: RunFolder) -> Iterator[None]:
    """Let no other process train in a run folder while the block runs. The folder itself is locked: nothing is left
    behind, and the kernel unlocks it when this process is gone, however it went.

    Raises:
        RunFolderError: another process does.
    """
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFolderError(f"run is under way in another process ({folder.path}); wait for its end") from None
    except OSError:
        pass  # a file system without locks of folders (NFS): there it is up to the user
    try:
        yield
    finally:
        os.close(descriptor)


def _fresh_name(name: str) -> str:
    # A recipe may be a path (`my/recipes.py:tiny`). The suffix keeps apart two runs that start in the same second.
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    return f"{plain}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def _drop_torn_line(log: BinaryIO) -> None:
    """Cut off a last line without its end, so that the next one does not grow onto it."""
    if log.seek(0, os.SEEK_END) == 0:
        return
    log.seek(-1, os.SEEK_END)
    if log.read(1) != b"\n":
        log.seek(0)
        log.truncate(log.read().rfind(b"\n") + 1)
