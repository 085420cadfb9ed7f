"""A stream whose text goes to a log too: what rank 0 prints is shown as it comes, and kept."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO, final

__all__ = ["Tee", "keep_output"]


@final
class Tee:
    """Takes the place of `sys.stdout` or `sys.stderr`: a terminal stays one, with its width and its progress bars.

    What a library writes to the descriptor itself, past Python, is shown and not kept.

    Args:
        stream: where the text is shown.
        log: where it is kept, as soon as it is written.
    """

    def __init__(self, stream: TextIO, log: Path) -> None:
        self._stream = stream
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # until the process ends

    def write(self, text: str) -> int:
        os.write(self._log, text.encode(self._stream.encoding or "utf-8", "backslashreplace"))
        return self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_output(log: Path) -> None:
    """From now until this process ends, keep what it prints."""
    sys.stdout, sys.stderr = Tee(sys.stdout, log), Tee(sys.stderr, log)
