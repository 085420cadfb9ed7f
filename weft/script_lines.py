"""Lines of a user's script: the one on a stack that asked for what happens now.

train.py    for batch in tqdm(loader):      <- this one
tqdm        for item in iterable:           <- or this, where no file of the user's own is on the stack
weft        ...
"""

import importlib.util
import linecache
import os
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

__all__ = [
    "NOWHERE",
    "ScriptLine",
    "find_script_frame",
    "is_script_file",
    "line_at",
    "line_of_frame",
    "owner_of",
]

_WEFT = str(Path(__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_MADE_BY_OTHERS = ("<eval_with_key", "<frozen", "<__array_function__", "<attrs generated")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@dataclass(frozen=True)
class ScriptLine:
    """A line of a file, with the function that it is in and its text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        """`train.py:12 in main: loss.backward()`."""
        inside = "" if self.function == "<module>" else f" in {self.function}"
        return f"{self.file}:{self.line}{inside}" + (f": {self.text}" if self.text else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


NOWHERE = ScriptLine("unknown", 0, "<module>", "")
"""Stands for a line that no stack had."""


def find_script_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from this one outwards, of the user's own code; else of an installed library other than Weft
    and PyTorch; None where there is neither."""
    of_library: FrameType | None = None
    while frame is not None:
        owner = owner_of(frame.f_code.co_filename)
        if owner == "user":
            return frame
        if owner == "library" and of_library is None:
            of_library = frame
        frame = frame.f_back
    return of_library


def line_of_frame(frame: FrameType | None) -> ScriptLine:
    return NOWHERE if frame is None else line_at(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=1024)
def line_at(code: CodeType, instruction: int) -> ScriptLine:
    """The line of an instruction of a frame (`f_lasti`): to keep these two is cheaper than to look for the line."""
    number = code.co_firstlineno
    for begin, end, line in code.co_lines():
        if begin <= instruction < end and line is not None:
            number = line
    text = linecache.getline(code.co_filename, number).strip()
    return ScriptLine(_shorten(code.co_filename), number, code.co_name, text)


def is_script_file(file: str) -> bool:
    """Whether a file is neither of Weft, nor of PyTorch, nor of Python itself."""
    return owner_of(file) in ("user", "library")


@cache
def owner_of(file: str) -> Literal["user", "library", "weft", "nobody"]:
    """Whose code a file is; nobody's is that of PyTorch and of Python itself."""
    if file.startswith(_WEFT):
        return "weft"
    if file.startswith((*_torch_folders(), *_MADE_BY_OTHERS)):
        return "nobody"
    if any(part in file for part in _INSTALLED):
        return "library"
    return "nobody" if file.startswith(_PYTHON) else "user"


@cache
def _torch_folders() -> tuple[str, ...]:
    """Found without importing it, which takes a second."""
    spec = importlib.util.find_spec("torch")
    return tuple(f"{folder}{os.sep}" for folder in (spec and spec.submodule_search_locations) or ())


def _shorten(file: str) -> str:
    """From here, where the file lies below; as it is otherwise."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file
