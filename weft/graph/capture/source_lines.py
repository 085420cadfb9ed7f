"""Lines of the user's code: those on the stack, or in a traceback, that asked for what happens now."""

import linecache
import os
import sys
import traceback
from functools import cache
from pathlib import Path
from types import FrameType

from weft.script_lines import is_script_file

__all__ = ["line_of", "line_on_stack", "quoted_line_on_stack"]

_WEFT = Path(__file__).parents[2]
_CAPTURES = (str(_WEFT / "graph"), str(_WEFT / "torch_private.py"))
_LIKE_A_USERS = tuple(str(_WEFT / "training" / part) for part in ("models", "losses.py"))  # of the built-in recipes


def line_on_stack() -> str:
    """`model.py:12`, or nothing where no line of the user's is at work."""
    frame = _frame()
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"


def quoted_line_on_stack() -> str:
    """`/home/me/model.py:12: return x + y`."""
    frame = _frame()
    return "unknown" if frame is None else _quoted(frame.f_code.co_filename, frame.f_lineno)


def line_of(error: BaseException) -> str:
    """The line of the user's that led to an error, quoted."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_the_users(frame.filename)]
    return _quoted(frames[-1].filename, frames[-1].lineno or 0) if frames else "unknown"


def _frame() -> FrameType | None:
    """The innermost frame of the user's code, None where Weft's own loop comes first: it asked for no operator."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = None if _is_of_a_loop(frame.f_code.co_filename) else frame.f_back
    return frame


def _quoted(file: str, number: int) -> str:
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"


@cache
def _is_of_a_loop(file: str) -> bool:
    return file.startswith(str(_WEFT)) and not file.startswith(_CAPTURES)


@cache
def _is_the_users(file: str) -> bool:
    return file.startswith(_LIKE_A_USERS) or is_script_file(file)
