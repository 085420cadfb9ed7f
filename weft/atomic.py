"""Files and folders that are whole or absent, never half written."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import StorageError

__all__ = ["use_new_folder", "write_json", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write beside the target, flush to disk, then rename over it: a crash leaves the old file or the new one."""
    handle = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = tempfile.NamedTemporaryFile(  # noqa: SIM115 -- closed before the rename
            "w", dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False, encoding="utf-8"
        )
        with handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(handle.name, path)
        sync_folder(path.parent)
    except OSError as error:
        if handle is not None:
            Path(handle.name).unlink(missing_ok=True)
        raise _storage_error(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON: not-a-number and infinity are refused, so encode them before."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def use_new_folder(path: Path) -> Iterator[Path]:
    """A scratch folder that becomes `path` when the block ends well, and is gone when it does not."""
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        yield scratch
        for file in scratch.rglob("*"):
            if file.is_file():
                _sync(file)
        sync_folder(scratch)
        os.replace(scratch, path)
        sync_folder(path.parent)
    except OSError as error:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        raise _storage_error(path, error) from error
    except BaseException:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def sync_folder(path: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"file could not be written ({path}: {reason}); free space or choose another --out")
