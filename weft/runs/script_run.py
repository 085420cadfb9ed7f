"""A recorded run of a script: what it takes to repeat it, and whether a repetition ended with the same bits.

RUN/script.json                 the script, a digest of its file, its arguments, ranks, plan and seed
RUN/decisions/seed-0/...        what servers and pairs decided (weft/distributed/consistency/control/journal.py)
RUN/rank-0.json                 a digest of the parameters with which rank 0 ended, and its number of updates
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from weft.atomic import write_json
from weft.distributed.script.observation.events import ScriptEnded, ScriptEvent, UpdateEnded, Woven, hash_woven
from weft.distributed.script.observation.supervision import Supervision, seed_generators, supervision_variables
from weft.errors import CorruptFileError, RunFolderError, UsageError
from weft.runs.script import Script, choose_plan, launch_script

if TYPE_CHECKING:
    from weft.specs import Plan

__all__ = ["ScriptRun", "compare_ends", "create_script_run", "open_script_run", "replay_script", "supervise"]

NAME = "script.json"


@dataclass(frozen=True)
class ScriptRun:
    """The content of `script.json`."""

    script: Script
    num_ranks: int
    plan: str | None  # that of the command; None where the script's own counts
    seed: int
    digest: str  # of the script's file; nothing of a module

    def write(self, folder: Path) -> None:
        write_json(folder / NAME, asdict(self))

    @staticmethod
    def read(folder: Path) -> "ScriptRun":
        try:
            data = json.loads((folder / NAME).read_text(encoding="utf-8"))
            return ScriptRun(**{**data, "script": Script.from_json(data["script"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CorruptFileError(f"run of a script cannot be read ({folder / NAME}: {error}); give another") from None

    def variables(self, folder: Path, replay: Path | None = None) -> dict[str, str]:
        """The environment of ranks that are recorded in a folder, and may repeat the decisions in another."""
        return supervision_variables(
            "weft.runs.script_run:supervise",
            run=str(folder.absolute()),
            replay=None if replay is None else str(replay.absolute()),
            seed=self.seed,
        )


def create_script_run(folder: Path, script: Script, num_ranks: int, plan: "Plan | None") -> ScriptRun:
    """Make the folder of a run that begins.

    Raises:
        RunFolderError: there is something in it already.
    """
    seed = secrets.randbelow(2**31)
    if script.path:
        script = replace(script, path=str(Path(script.path).absolute()))
    return _create(folder, ScriptRun(script, num_ranks, None if plan is None else str(plan), seed, _digest_of(script)))


def replay_script(folder: Path, out: Path) -> tuple[bool, str]:
    """Run a recorded script again, with the decisions that were taken then; whether every rank ended with the same
    bits, in words too.

    Raises:
        UsageError: the script is not the one that was recorded.
        RunFolderError: the run did not come to its end.
    """
    run = _create(out, open_script_run(folder))
    plan = choose_plan(run.plan, run.num_ranks)
    launch_script(run.script, run.num_ranks, plan, environment=run.variables(out, folder))
    return compare_ends(folder, _ends(out, run.num_ranks))


def open_script_run(folder: Path) -> ScriptRun:
    """A run that can be repeated.

    Raises:
        UsageError: the script is not the one that was recorded.
        RunFolderError: the run did not come to its end.
    """
    recorded = ScriptRun.read(folder)
    recorded.script.check()
    if _digest_of(recorded.script) != recorded.digest:
        raise UsageError(f"script has changed since it was recorded ({recorded.script.name}); run it anew with --out")
    ends = _ends(folder, recorded.num_ranks)
    if None in ends:
        raise RunFolderError(f"run did not come to its end ({folder}: rank {ends.index(None)}); record another")
    return recorded


def compare_ends(folder: Path, ends: Sequence[str | None]) -> tuple[bool, str]:
    """Whether every rank ended with the parameters that it had in a recorded run, by their digests; in words too."""
    differ = [rank for rank, pair in enumerate(zip(ends, _ends(folder, len(ends)), strict=True)) if len(set(pair)) > 1]
    if differ:
        return False, f"replay differs from {folder} (ranks: {', '.join(map(str, differ))})"
    return True, f"replay ended with the parameters of {folder} on every rank, to the last bit"


def _create(folder: Path, run: ScriptRun) -> ScriptRun:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"folder cannot be made ({folder}: {error.strerror}); give another") from None
    if any(folder.iterdir()):
        raise RunFolderError(f"folder is not empty ({folder}); give one that does not exist")
    run.write(folder)
    return run


def _digest_of(script: Script) -> str:
    return hashlib.sha256(Path(script.path).read_bytes()).hexdigest() if script.path else ""


def _ends(folder: Path, num_ranks: int) -> list[str | None]:
    files = [folder / f"rank-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text(encoding="utf-8"))["parameters"] if file.is_file() else None for file in files]


def supervise(rank: int, run: str, replay: str | None, seed: int) -> Supervision:
    """The supervision of a rank that is recorded. All begin with one seed, so that a script that sets none begins the
    same again."""
    seed_generators(seed)
    folder = Path(run)
    return Supervision((EndWriter(folder, rank),), run=folder, replay=None if replay is None else Path(replay))


@final
class EndWriter:
    """An observer that writes how a rank ended; one that wove nothing is no rank, or a script without ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"rank-{rank}.json"
        self._woven: list[Woven] = []
        self._num_updates = 0

    def __call__(self, event: ScriptEvent) -> None:
        match event:
            case Woven():
                self._woven.append(event)
            case UpdateEnded():
                self._num_updates += 1
            case ScriptEnded() if self._woven:
                write_json(self._file, {"parameters": hash_woven(self._woven), "updates": self._num_updates})
            case _:
                pass
