"""A rank program: an import path and JSON, never a closure, so that every engine can start it.

Its folder holds what the engine and its ranks tell each other:

    owner               locked by the launcher (meeting.py)
    program.json        the import path, its arguments, and variables of the environment
    process-RANK        the id of the rank's process
    joined-RANK         is there once the others know the rank, and will hear of its death
    rank-RANK.log       what the rank printed; that of rank 0, which is shown, only where logs are kept
    out-RANK, err-RANK  where the rank prints to, if that goes through the launcher (relay.py)
    result-RANK.json    what the rank returned, or
    failure-RANK.json   the error as its rank saw it
"""

import importlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.atomic import write_json
from weft.engines.failure import Failure

__all__ = [
    "INTERRUPTED",
    "RankProgram",
    "has_joined",
    "has_result",
    "keep_logs",
    "log_of",
    "mark_process",
    "read_failure",
    "read_process",
    "read_result",
    "stream_of",
]

INTERRUPTED = 130


@dataclass(frozen=True)
class RankProgram:
    """The program of every rank: `module:function` called with keyword arguments that JSON can hold.

    Args:
        variables: of the environment, set in every rank before anything of the program is imported.
    """

    path: str
    arguments: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        write_json(folder / "program.json", asdict(self))

    @staticmethod
    def read(folder: Path) -> "RankProgram":
        return RankProgram(**json.loads((folder / "program.json").read_text()))

    def call(self) -> Any:
        os.environ.update(self.variables)
        module, _, name = self.path.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


def read_result(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"result-{rank}.json").read_text())


def has_result(folder: Path, rank: int) -> bool:
    return (folder / f"result-{rank}.json").is_file()


def mark_process(folder: Path, rank: int) -> None:
    """Leave the id of this process, which is the rank."""
    scratch = folder / f".process-{rank}"
    scratch.write_text(str(os.getpid()))
    scratch.replace(folder / f"process-{rank}")


def read_process(folder: Path, rank: int) -> int | None:
    """The process of a rank, once it runs."""
    file = folder / f"process-{rank}"
    return int(file.read_text()) if file.is_file() else None


def has_joined(folder: Path, rank: int) -> bool:
    return (folder / f"joined-{rank}").is_file()


def read_failure(folder: Path, rank: int) -> Failure | None:
    file = folder / f"failure-{rank}.json"
    return Failure.from_json(json.loads(file.read_text())) if file.is_file() else None


def log_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def keep_logs(folder: Path, num_ranks: int, logs: Path) -> None:
    """Ranks write through links to another folder, so that a log is there however the run ends."""
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        log_of(folder, rank).symlink_to(log_of(logs.absolute(), rank))


def stream_of(folder: Path, rank: int, stream: Literal["out", "err"]) -> Path:
    return folder / f"{stream}-{rank}"
