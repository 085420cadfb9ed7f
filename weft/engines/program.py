"""A rank program: an import path and JSON, never a closure, so that every engine can start it.

    python -m weft.engines.program FOLDER     with WEFT_RANK, WEFT_SIZE, WEFT_MEETING, WEFT_STARTER in the environment

reads FOLDER/program.json, calls the function with the arguments, and leaves FOLDER/result-RANK.json, or
FOLDER/failure-RANK.json with the error as its rank saw it. FOLDER/joined-RANK is there once the others know the rank.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.atomic import write_json
from weft.errors import PeerLostError, WeftError

__all__ = ["Failure", "Program", "has_joined", "has_result", "read_failure", "read_result"]

INTERRUPTED = 130


@dataclass(frozen=True)
class Program:
    """What every rank runs: `module:function` called with keyword arguments that JSON can hold."""

    path: str
    arguments: dict[str, Any]

    def write(self, folder: Path) -> None:
        write_json(folder / "program.json", asdict(self))

    @staticmethod
    def read(folder: Path) -> "Program":
        return Program(**json.loads((folder / "program.json").read_text()))

    def call(self) -> Any:
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


@dataclass(frozen=True)
class Failure:
    """Why a rank failed. One that lost a peer is a witness, not the cause."""

    rank: int
    moment: float
    kind: str
    text: str
    traceback: str
    exit_code: int
    is_witness: bool


def read_result(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"result-{rank}.json").read_text())


def has_result(folder: Path, rank: int) -> bool:
    return (folder / f"result-{rank}.json").is_file()


def has_joined(folder: Path, rank: int) -> bool:
    return (folder / f"joined-{rank}").is_file()


def read_failure(folder: Path, rank: int) -> Failure | None:
    file = folder / f"failure-{rank}.json"
    return Failure(**json.loads(file.read_text())) if file.is_file() else None


def run_rank(folder: Path, rank: int) -> int:
    """Call the program and leave its result or failure; returns the exit code."""
    try:
        write_json(folder / f"result-{rank}.json", Program.read(folder).call())
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        exit_code = error.exit_code if isinstance(error, WeftError) else 3
        failure = Failure(
            rank,
            time.time(),
            type(error).__name__,
            str(error),
            traceback.format_exc(),
            exit_code,
            isinstance(error, PeerLostError),
        )
        write_json(folder / f"failure-{rank}.json", asdict(failure))
        return exit_code
    return 0


def _die_with(starter: int) -> None:
    """No orphan: the kernel ends this process when the one that started it is gone, however it went (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != starter:  # gone already
            os._exit(1)


if __name__ == "__main__":
    _die_with(int(os.environ["WEFT_STARTER"]))
    sys.exit(run_rank(Path(sys.argv[1]), int(os.environ["WEFT_RANK"])))
