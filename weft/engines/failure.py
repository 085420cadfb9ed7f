"""Why a rank failed, as data: what was raised, and where in the user's own files."""

import time
from dataclasses import dataclass
from itertools import takewhile
from traceback import FrameSummary, TracebackException
from typing import Any

from weft.errors import TrainingError, WeftError
from weft.script_lines import ScriptLine, owner_of

__all__ = ["Failure", "describe", "find_cause"]

MOST_FRAMES = 20  # an endless recursion has a thousand


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
    frames: tuple[ScriptLine, ...] = ()

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Failure":
        return Failure(**{**data, "frames": tuple(ScriptLine(**frame) for frame in data["frames"])})

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
    frames = tuple(ScriptLine(f.filename, f.lineno or 0, f.name, f.line or "") for f in seen.stack) if has_own else ()
    if has_own or isinstance(error, SyntaxError):
        shown = "".join(seen.format())
        if has_own and is_raised_here and not is_ours:
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

    That is frames of Weft and of what runs a script; where Weft was called last, all that it called too, and what it
    had caught before.

        train.py:9, torch/_tensor.py:630, weft/.../gradients.py:40: PeerLostError       train.py:9
        weft/.../script.py:60, train.py:9, torch/nn/functional.py:100: RuntimeError     train.py:9, functional.py:100
    """
    is_raised_here = _is_raised_here(seen)
    below = len(_after_last_own(seen)) if is_raised_here else 0
    kept = [frame for frame in seen.stack[: len(seen.stack) - below] if not _is_ours(frame)]
    seen.stack[:] = kept
    for inner in seen.exceptions or ():
        _leave_own_frames(inner)
    for name in ("__cause__", "__context__"):
        inner = getattr(seen, name)
        if inner is not None and not _leave_own_frames(inner) and is_raised_here:
            setattr(seen, name, None)
    return any(map(_is_own, kept))


def _after_last_own(seen: TracebackException) -> list[FrameSummary]:
    """The frames below the user's innermost one."""
    return list(takewhile(lambda frame: not _is_own(frame), reversed(seen.stack)))


def _is_raised_here(seen: TracebackException) -> bool:
    """Whether the user's innermost line called Weft, and the error came from there."""
    return any(owner_of(frame.filename) == "weft" for frame in _after_last_own(seen))


def _is_ours(frame: FrameSummary) -> bool:
    """Of Weft, or of Python's own way to run a module."""
    return owner_of(frame.filename) == "weft" or frame.filename.startswith("<frozen ")


def _is_own(frame: FrameSummary) -> bool:
    """The user's: no part of Weft, nor of a library."""
    return owner_of(frame.filename) == "user"
