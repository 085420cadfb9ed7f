"""A user's own script on ranks: started as `python` would start it, and refused where its ranks never met.

Launchers use this too, so nothing here imports torch before it is needed.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from threading import Timer
from types import ModuleType
from typing import TYPE_CHECKING, Any

from weft.engines.engine import STRICT, AbstractEngine, run_on
from weft.engines.hosts import HostsEngine, Rendezvous
from weft.engines.local import LocalEngine
from weft.engines.rank_program import RankProgram
from weft.engines.relay import Shows
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.specs import Plan

__all__ = ["Script", "choose_plan", "launch_script", "run_script"]

NUM_RANKS = 2  # where nothing says how many
NOTE_SECONDS = 60.0

ALONE = "each rank computes a copy of its own"
CURE = "call weft.weave or torch.distributed.init_process_group, or run it with python"


@dataclass(frozen=True)
class Script:
    """A file or a module, and the arguments that are its own.

    Args:
        path: of a Python file; or
        module: the name of one, as for `python -m`.
    """

    path: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.path) != bool(self.module), "a script is a file or a module"

    @property
    def name(self) -> str:
        return self.path or f"-m {self.module}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Script":
        return Script(data["path"], data["module"], tuple(data["arguments"]))

    def check(self) -> None:
        """Raise UsageError where there is no such file; whether there is such a module is for Python to find out."""
        if self.path and not Path(self.path).is_file():
            raise UsageError(f"no such script ({self.path}); give the path of a Python file")

    def run(self) -> bool:
        """Run it in this process, as its main program: what `python path ...` or `python -m module ...` would do.

        Returns when it has ended well; whether at its last line, and not by `sys.exit(0)`. Its main module stays, for
        what still runs then.

        Raises:
            SystemExit: with another exit code, or a text.
        """
        try:
            if self.path:
                _run_file(self.path, self.arguments)
            else:
                _run_module(self.module, self.arguments)
        except SystemExit as left:
            if not (left.code is None or left.code == 0):
                raise
            return False
        return True


def _run_file(path: str, arguments: tuple[str, ...]) -> None:
    file = os.path.abspath(path)
    loader = SourceFileLoader("__main__", file)
    main = _become_main(str(Path(path).resolve().parent), [path, *arguments])
    main.__dict__.update(__file__=file, __loader__=loader, __cached__=None)
    exec(loader.source_to_code(loader.get_data(file), file), main.__dict__)


def _run_module(name: str, arguments: tuple[str, ...]) -> None:
    _become_main(os.getcwd(), ["-m", *arguments])
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls; it needs our main module


def _become_main(folder: str, arguments: list[str]) -> ModuleType:
    """A new main module, and the arguments and first folder of imports that it has in a process of its own."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.argv = arguments
    if not sys.flags.safe_path:
        sys.path[0] = folder  # in place of that from which this process was started
    return main


def run_script(script: dict[str, Any]) -> None:
    """The rank program of a launch: run the script, and see that it has met the other ranks.

    Args:
        script: as `Script.to_json` gives it.

    Raises:
        UsageError: it never joined them, and N ranks have done the same work N times.
    """
    from weft.distributed.torch_backend import use_torch_backend

    chosen = Script.from_json(script)
    with _use_early_note(chosen), use_torch_backend(), _use_supervision(), _note_updates() as updates:
        is_at_end = chosen.run()
    if _is_alone() and (is_at_end or updates):  # not where it only told how it is used
        raise UsageError(f"script never joined the other ranks, so that {ALONE} ({chosen.name}); {CURE}")


@contextmanager
def _note_updates() -> Iterator[list[str]]:
    """Holds an entry from the first step of any optimizer on."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    found: list[str] = []

    def note(optimizer: object, *_arguments: object) -> None:
        found.append(type(optimizer).__name__)
        hook.remove()

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def _use_early_note(script: Script) -> Iterator[None]:
    """Long before the end, in which it is an error, rank 0 says so."""

    def tell() -> None:
        if _is_alone():
            text = f"script has not joined the other ranks after {NOTE_SECONDS:g} s ({script.name})"
            print(f"note: {text}; if it never does, {ALONE}: {CURE}", file=sys.stderr, flush=True)

    timer = Timer(NOTE_SECONDS, tell)
    timer.daemon = True
    if os.environ.get("WEFT_RANK") == "0" and os.environ.get("WEFT_SIZE") != "1":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _use_supervision() -> Iterator[None]:
    """Who watches the script is there before it begins, and hears that it has ended."""
    if "WEFT_SUPERVISION" not in os.environ:
        yield
        return
    from weft.distributed.script.observation.events import ScriptEnded
    from weft.distributed.script.world.world import find_world

    supervision = find_world().supervision
    if supervision.is_silent:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        yield
    finally:
        supervision.tell(ScriptEnded())


def _is_alone() -> bool:
    from weft.distributed.place import find_launch, has_met

    return find_launch().size > 1 and not has_met()


def choose_plan(text: str | None, workers: int | None, num_ranks: int = NUM_RANKS) -> "Plan | None":
    """The plan that a command gives to a script; None where it leaves that to the script.

    Args:
        text: a plan, whose degrees may lack their numbers, which is then `workers`; where none is named, it is `data`.
        num_ranks: where nothing says how many.

    Raises:
        PlanError: there is no such plan.
        UsageError: it has another number of ranks than `workers`.
    """
    if text is None:
        return None
    from weft.specs import parse_plan_for
    from weft.specs.axes import DEGREES

    if not any(word.partition("=")[0] in DEGREES for word in text.split()):
        text = f"data {text}"
    plan = parse_plan_for(text, workers or num_ranks)
    if workers not in (None, plan.num_ranks):
        raise UsageError(f"plan and workers differ (plan: {plan.num_ranks}, workers: {workers}); give one of them")
    return plan


def launch_script(
    script: Script,
    num_ranks: int | None = None,
    plan: "Plan | None" = None,
    *,
    environment: Mapping[str, str] | None = None,
    shows: Shows = "first",
    logs: Path | None = None,
    rendezvous: Rendezvous | None = None,
) -> None:
    """Run a script on ranks of this machine, until all have ended well.

    Args:
        num_ranks: processes, where no plan says how many; else the plan has so many ranks, and maybe servers beside.
        plan: goes before that of the script.
        environment: variables that every rank gets.
        shows: whose output is shown: that of rank 0, or all lines behind their ranks.
        logs: the folder in which the output of each rank is kept.
        rendezvous: where the hosts meet, if this machine is one of several that share the ranks.

    Raises:
        RankFailedError: as `run_on` raises it.
    """
    script.check()
    variables, num_processes, tolerance = dict(environment or {}), num_ranks or NUM_RANKS, STRICT
    engine: AbstractEngine = LocalEngine()
    if rendezvous is not None:
        engine = HostsEngine(rendezvous, f"{script.name}, plan: {plan or 'of the script'}")
    if plan is not None:
        num_processes = plan.roles.num_processes
        # Servers of their own are processes and no ranks: they come after those that scripts count.
        sizes = ("WORLD_SIZE", "ROLE_WORLD_SIZE", *(("LOCAL_WORLD_SIZE",) if rendezvous is None else ()))
        variables |= {"WEFT_PLAN": str(plan), **dict.fromkeys(sizes, str(plan.num_ranks))}
        if rendezvous is None:
            from weft.engines.tolerance import tolerance_of

            tolerance = tolerance_of(plan)
    program = RankProgram("weft.runs.script:run_script", {"script": script.to_json()}, variables)
    run_on(
        engine, program, num_processes, silent=True, tolerance=tolerance, logs=logs, shows=shows, interrupts_all=True
    )
