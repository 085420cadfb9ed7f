"""Where the time of a script's steps goes: by part of its loop, and by operator.

    loop         data | forward | loss and backward | communication | update | rest       every other step, undisturbed
    operators    aten.addmm 12 calls ...                                                  steps between, call by call

Of ranks, rank 0's. Communication is what a rank waits for after its own backward; where ranks do not meet there
(servers, averaging), it is part of the update.
"""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, final

from weft.atomic import write_json
from weft.distributed.script.observation.events import (
    BackwardEnded,
    BatchTaken,
    ExchangeEnded,
    ForwardBegan,
    ForwardEnded,
    ScriptEnded,
    ScriptEvent,
    UpdateBegan,
    UpdateEnded,
    Woven,
)
from weft.distributed.script.observation.supervision import Supervision, supervision_variables
from weft.distributed.script.observation.tracing import StepsDoneError
from weft.errors import UsageError
from weft.metrics.statistics import Summary, summarise
from weft.operators.aten_cost import cost_of
from weft.operators.cost import Cost
from weft.runs.script import Script, launch_script
from weft.torch_private import DispatchMode, in_backward, leave_compiler_alone

if TYPE_CHECKING:
    from weft.specs import Plan

__all__ = ["LoopProfile", "ScriptOperator", "ScriptProfile", "profile_script", "supervise"]

NUM_WARM_UPS = 3
PARTS = ("data", "forward", "loss and backward", "communication", "update", "rest")


@dataclass(frozen=True)
class ScriptOperator:
    """All calls of one kind in one part of a step; seconds and calls are those of a step."""

    target: str
    part: str
    count: float
    seconds: float
    cost: Cost | None


@dataclass(frozen=True)
class ScriptProfile:
    """Of a step: its seconds, those of its parts (medians), and its operators, longest first."""

    seconds: Summary
    parts: Mapping[str, float]
    operators: tuple[ScriptOperator, ...]


def profile_script(
    script: Script, num_ranks: int, plan: "Plan | None" = None, *, num_steps: int = 20, num_threads: int = 1
) -> ScriptProfile:
    """Run the first steps of a script on ranks of this machine, and tell where their time goes.

    Raises:
        UsageError: it took fewer steps than it takes to warm up.
    """
    with tempfile.TemporaryDirectory(prefix="weft-profile-") as folder:
        file = Path(folder) / "profile.json"
        watch = supervision_variables("weft.runs.script_profile:supervise", file=str(file), num_steps=num_steps)
        launch_script(script, num_ranks, plan, environment={**watch, "OMP_NUM_THREADS": str(num_threads)})
        if not file.is_file():
            fact = f"script took too few steps of a woven optimizer to be timed (warm-up: {NUM_WARM_UPS})"
            raise UsageError(f"{fact}; let it take more")
        return _profile_from(json.loads(file.read_text()))


def _profile_from(found: Mapping[str, Any]) -> ScriptProfile:
    steps: Sequence[Mapping[str, float]] = found["steps"]
    operators = []
    for row in found["operators"]:
        cost = None if row["cost"] is None else Cost(**row["cost"])
        operators.append(ScriptOperator(row["target"], row["part"], row["count"], row["seconds"], cost))
    return ScriptProfile(
        seconds=summarise([sum(step.values()) for step in steps]),
        parts={part: median(step.get(part, 0.0) for step in steps) for part in PARTS},
        operators=tuple(sorted(operators, key=lambda operator: -operator.seconds)),
    )


def supervise(rank: int, file: str, num_steps: int) -> Supervision:
    """The supervision of a rank whose steps are timed; rank 0 writes them."""
    return Supervision((LoopProfile(Path(file) if rank == 0 else None, num_steps),), is_silent=True)


@final
class LoopProfile:
    """An observer that reads the time at every event, and ends the script when it has seen enough."""

    def __init__(self, file: Path | None, num_steps: int) -> None:
        self._file = file
        self._num_steps = num_steps
        self._marked = time.perf_counter()
        self._parts: dict[str, float] = defaultdict(float)
        self._steps: list[dict[str, float]] = []
        self._num_steps_seen = 0
        self._operators = OperatorTimes()
        self._is_written = False

    def __call__(self, event: ScriptEvent) -> None:
        now = time.perf_counter()
        part = _part_before(event)
        if part:
            self._parts[part] += now - self._marked
            self._marked = now
            self._operators.part = _part_after(event)
        if isinstance(event, Woven):
            self._marked = now
        elif isinstance(event, UpdateEnded):
            self._end_step()
        elif isinstance(event, ScriptEnded):
            self._write()

    def _end_step(self) -> None:
        self._num_steps_seen += 1
        if self._operators.is_on:
            self._operators.leave()
            self._operators.num_steps += 1
        elif self._num_steps_seen > NUM_WARM_UPS:
            self._steps.append(dict(self._parts))
            self._operators.enter()
        self._parts.clear()
        if self._operators.num_steps == self._num_steps:
            self._write()
            raise StepsDoneError
        self._marked = time.perf_counter()

    def _write(self) -> None:
        """As far as it went, of a script that ended before."""
        if self._operators.is_on:
            self._operators.leave()
        if self._file is not None and self._steps and not self._is_written:
            self._is_written = True
            write_json(self._file, {"steps": self._steps, "operators": self._operators.rows()})


def _part_before(event: ScriptEvent) -> str:
    """The part of the loop that an event ends."""
    match event:
        case BatchTaken():
            return "data"
        case ForwardEnded():
            return "forward"
        case BackwardEnded():
            return "loss and backward"
        case ExchangeEnded():
            return "communication"
        case UpdateEnded():
            return "update"
        case ForwardBegan() | UpdateBegan():
            return "rest"
        case _:
            return ""


def _part_after(event: ScriptEvent) -> str:
    """The part to which operators belong from here on; backward's own are told by autograd."""
    return {ForwardBegan: "forward", ForwardEnded: "loss", UpdateBegan: "update"}.get(type(event), "rest")


@dataclass
class _Calls:
    count: int = 0
    seconds: float = 0.0
    cost: Cost | None = field(default_factory=lambda: Cost(0, 0, 0))


@final
@leave_compiler_alone
class OperatorTimes(DispatchMode):
    """A dispatch mode that times every call of ATen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = "rest"
        self.is_on = False
        self.num_steps = 0  # that it saw from beginning to end
        self._calls: dict[tuple[str, str], _Calls] = defaultdict(_Calls)

    def enter(self) -> None:
        """From now on, in this thread."""
        self.is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.is_on = False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        began = time.perf_counter()
        result = func(*args, **options)
        seconds = time.perf_counter() - began
        part = "backward" if in_backward() else self.part
        calls = self._calls[str(getattr(func, "overloadpacket", func)), part]
        calls.count += 1
        calls.seconds += seconds
        cost = cost_of(func, args, options, result)
        calls.cost = None if cost is None or calls.cost is None else calls.cost + cost
        return result

    def rows(self) -> list[dict[str, Any]]:
        number = max(1, self.num_steps)
        return [
            {
                "target": target,
                "part": part,
                "count": calls.count / number,
                "seconds": calls.seconds / number,
                "cost": None if calls.cost is None else asdict(_share(calls.cost, number)),
            }
            for (target, part), calls in self._calls.items()
        ]


def _share(cost: Cost, number: int) -> Cost:
    return Cost(cost.flops // number, cost.bytes_read // number, cost.bytes_written // number, cost.workspace)
