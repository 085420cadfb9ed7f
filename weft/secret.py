"""The run's secret: made by whoever starts the peers, handed to them in a file or the environment, never sent.

It has no room of its own because both sides use it: engines, which do not import torch, and the mailbox.
"""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from weft.errors import UsageError

__all__ = ["SECRET_VARIABLE", "find_secret", "make_secret", "read_secret", "write_secret"]

SECRET_VARIABLE = "WEFT_SECRET"
MIN_BYTES = 16
MAKE = "openssl rand -hex 32"


def make_secret() -> bytes:
    return secrets.token_bytes(32)


def write_secret(folder: Path | str, secret: bytes) -> Path:
    """Leave the secret in a file that only its owner can read."""
    path = Path(folder) / "secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret.hex().encode())
    return path


def find_secret(folder: Path | None = None, environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret of the environment (in hexadecimal), or else of the folder where peers meet.

    Raises:
        UsageError: there is none, it is too short, or others may read its file.
    """
    text = environment.get(SECRET_VARIABLE) or (_read(folder / "secret") if folder is not None else None)
    if text is None:
        raise UsageError(f"there is no secret for the mailbox; start peers with weft run, or set {SECRET_VARIABLE}")
    return _decode(text)


def read_secret(path: Path) -> bytes:
    """The secret in a file, in hexadecimal.

    Raises:
        UsageError: there is no such file, what it holds is no secret, or others may read it.
    """
    text = _read(path)
    if text is None:
        raise UsageError(f"there is no file with a secret ({path}); make one with {MAKE}, and chmod 600")
    return _decode(text.strip())


def _decode(text: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        raise UsageError(f"secret of the mailbox is not hexadecimal; make one with {MAKE}") from None
    if len(secret) < MIN_BYTES:
        raise UsageError(
            f"secret of the mailbox is too short (bytes: {len(secret)}, at least: {MIN_BYTES}); make one with {MAKE}"
        )
    return secret


def _read(path: Path) -> str | None:
    try:
        if path.stat().st_mode & 0o077:
            raise UsageError(f"secret of the mailbox can be read by others ({path}); chmod 600")
        return path.read_text()
    except FileNotFoundError:
        return None
