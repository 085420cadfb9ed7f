"""Files and folders that are whole or absent, never half written."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.errors import StorageError

__all__ = ["storage_error", "sync", "use_folder_lock", "use_new_folder", "write_bytes", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with the line ends of the text, as `write_bytes` writes."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, then rename over it: a crash leaves the old file or the new one."""
    scratch = _scratch_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        sync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON: not-a-number and infinity are refused, so encode them before."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def use_folder_lock(folder: Path) -> Iterator[None]:
    """One process of this host at a time; where folders cannot be locked, all at once."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def use_new_folder(path: Path) -> Iterator[Path]:
    """A scratch folder that becomes `path` when the block ends well, and is gone when it does not."""
    scratch = _scratch_path(path)
    try:
        scratch.mkdir(parents=True)
        yield scratch
        for file in scratch.rglob("*"):
            if file.is_file():
                sync(file)
        sync(scratch)
        os.replace(scratch, path)
        sync(path.parent)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(path, error) from error
        raise


def sync(path: Path) -> None:
    """Make a file survive a power cut; of a folder, what was renamed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error for a user, for one of the system."""
    reason = error.strerror or str(error)
    return StorageError(f"file could not be written ({path}: {reason}); free space or choose another --out")


def _scratch_path(path: Path) -> Path:
    # Made by hand because tempfile would make it readable by its owner only, and so would be what it is renamed to.
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
