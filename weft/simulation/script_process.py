"""A virtual rank as a process of its own for a script: its main module, streams, variables and generators.

Modules that a script imports are those of the one process, imported once: what they keep at their top level is common
to all ranks. Loaders fetch in the rank itself: the same samples, without processes of their own.
"""

import inspect
import os
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from weft.distributed.virtual import AbstractProcessState

__all__ = ["ScriptCode", "ScriptState", "use_script_process"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WITHOUT_WORKERS = {
    "num_workers": 0,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "multiprocessing_context": None,
}


@final
class ScriptState(AbstractProcessState):
    """All that scripts change of their process as they run."""

    def take(self) -> tuple[Any, ...]:
        variables = tuple(os.environ.get(name) for name in VARIABLES)
        streams = sys.stdout, sys.stderr, sys.modules["__main__"]
        return torch.get_rng_state(), random.getstate(), np.random.get_state(), streams, variables

    def put(self, state: tuple[Any, ...]) -> None:
        torch_state, python_state, numpy_state, streams, variables = state
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        sys.stdout, sys.stderr, sys.modules["__main__"] = streams
        for name, value in zip(VARIABLES, variables, strict=True):
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@final
class ScriptCode:
    """A script, compiled once, that every rank runs in a namespace of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._code: CodeType = compile(path.read_bytes(), str(self._path), "exec")

    def run(self, rank: int, num_ranks: int, nowhere: TextIO, *, is_silent: bool = False) -> None:
        """Be the main module of this rank until the script ends; what others than rank 0 print goes nowhere.

        Raises:
            SystemExit: the script left with an exit code that is not 0, or with a text.
        """
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(self._path), __builtins__=sys.modules["builtins"])
        sys.modules["__main__"] = main
        if is_silent or rank:
            sys.stdout = nowhere
        if rank:
            sys.stderr = nowhere
        os.environ.update(zip(VARIABLES, map(str, (rank, num_ranks, rank, num_ranks)), strict=True))
        try:
            exec(self._code, main.__dict__)
        except SystemExit as left:
            if not (left.code is None or left.code == 0):
                raise


@contextmanager
def use_script_process(path: Path, arguments: Sequence[str]) -> Iterator[TextIO]:
    """A process for all ranks of a script: its arguments, where imports are looked for, loaders without workers. Gives
    a stream that goes nowhere."""
    before = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = [str(path), *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(path.resolve().parent))
    try:
        with _use_no_workers(), open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        torch.set_num_threads(before[2])


@contextmanager
def _use_no_workers() -> Iterator[None]:
    make = DataLoader.__init__
    names = inspect.signature(make)

    @wraps(make)
    def make_without(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = names.bind(self, *args, **kwargs)
        bound.arguments.update({name: value for name, value in WITHOUT_WORKERS.items() if name in bound.arguments})
        make(*bound.args, **bound.kwargs)

    DataLoader.__init__ = make_without  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__init__ = make  # type: ignore[method-assign]
