"""Why a rank failed, as data: what was raised, and where in the user's own files."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import Any

from weft.errors import TrainingError, WeftError

__all__ = ["Failure", "Frame", "describe", "find_cause"]

WEFT = f"{Path(__file__).parents[1]}{os.sep}"
LIBRARIES = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")
PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
MOST_FRAMES = 20  # an endless recursion has a thousand


@dataclass(frozen=True)
class Frame:
    """A line of a file that was being run."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. One that lost a peer is a witness, not the cause.

    Args:
        moment: seconds since the epoch.
        text: the fact; of errors that are not Weft's, behind their type.
        traceback: as Python prints it.
        shown: the same without frames of Weft; nothing where Weft has said it all in `text`.
        frames: those of `shown`, of the error itself, the innermost last.
    """

    rank: int
    moment: float
    kind: str
    text: str
    traceback: str
    exit_code: int
    is_witness: bool
    shown: str = ""
    frames: tuple[Frame, ...] = ()

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Failure":
        return Failure(**{**data, "frames": tuple(Frame(**frame) for frame in data["frames"])})

    @property
    def where(self) -> str:
        """The user's file and line, if any is known."""
        return f"{self.frames[-1].file}:{self.frames[-1].line}" if self.frames else ""


def find_cause(failures: list[Failure]) -> Failure:
    """The failure that began it: the first that is not a witness of another's."""
    return min(failures, key=lambda failure: (failure.is_witness, failure.moment))


def describe(error: BaseException, rank: int) -> Failure:
    """The failure that an exception is."""
    is_ours = isinstance(error, WeftError)
    kind = type(error).__name__
    seen = TracebackException.from_exception(error)
    whole = "".join(seen.format())
    is_raised_here = _is_raised_here(seen)
    has_own = _leave_own_frames(seen)
    frames = tuple(Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in seen.stack) if has_own else ()
    if has_own or isinstance(error, SyntaxError):
        shown = "".join(seen.format())
        if is_raised_here and not is_ours:
            shown += "(raised inside Weft; --debug shows where)\n"
    else:  # nobody but a programmer of Weft can tell more than the text does, and needs all of it
        shown = "" if is_ours else whole
    return Failure(
        rank,
        time.time(),
        kind,
        _text_of(error) if is_ours else f"{kind}: {_text_of(error)}".removesuffix(": "),
        whole,
        error.exit_code if isinstance(error, WeftError) else TrainingError.exit_code,
        isinstance(error, WeftError) and error.is_witness,
        shown,
        frames[-MOST_FRAMES:],
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<an error whose text cannot be made>"


def _leave_own_frames(seen: TracebackException) -> bool:
    """Take away what is not the user's business; whether a frame of the user's own is left.

    That is frames of Weft and of what runs a script; where Weft itself raised the error, also those of libraries on the
    way to it (autograd, which calls a hook), and what Weft had caught before.

        train.py:9, torch/_tensor.py:630, weft/.../gradients.py:40: PeerLostError       train.py:9
        weft/.../script.py:60, train.py:9, torch/nn/functional.py:100: RuntimeError     train.py:9, functional.py:100
    """
    own = [frame for frame in seen.stack if not _is_weft(frame) and not frame.filename.startswith("<frozen ")]
    is_raised_here = _is_raised_here(seen)
    while is_raised_here and own and _is_library(own[-1]):
        own.pop()
    seen.stack[:] = own
    for inner in seen.exceptions or ():
        _leave_own_frames(inner)
    for name in ("__cause__", "__context__"):
        inner = getattr(seen, name)
        if inner is not None and not _leave_own_frames(inner) and is_raised_here:
            setattr(seen, name, None)
    return any(not _is_library(frame) for frame in own)


def _is_raised_here(seen: TracebackException) -> bool:
    return bool(seen.stack) and _is_weft(seen.stack[-1])


def _is_weft(frame: FrameSummary) -> bool:
    return frame.filename.startswith(WEFT)


def _is_library(frame: FrameSummary) -> bool:
    return frame.filename.startswith(LIBRARIES) or any(part in frame.filename for part in PACKAGES)
