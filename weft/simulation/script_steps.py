"""The steps of a script on a virtual rank: charged to its clock, or timed on this machine so that they can be."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import final

import torch

from weft.distributed.script.observation.events import (
    BackwardEnded,
    BatchTaken,
    ForwardEnded,
    GradientReady,
    PlanChosen,
    ScriptEnded,
    ScriptEvent,
    UpdateBegan,
    UpdateEnded,
    Woven,
    hash_woven,
    num_rows,
)
from weft.distributed.script.observation.tracing import StepsDoneError
from weft.errors import UsageError
from weft.simulation.computation import ComputeModel, spread_evenly
from weft.simulation.pace import Pace
from weft.training.replicas import Traffic

__all__ = ["OtherPlanError", "StepCharges", "StepTimes", "Stopper", "model_of"]

NUM_WARM_UPS = 2


class OtherPlanError(BaseException):
    """A script weaves by a plan of its own, for which the cluster was not made. Not an Exception: scripts go on after
    those."""

    def __init__(self, plan: str) -> None:
        super().__init__(plan)
        self.plan = plan


@final
class StepCharges:
    """An observer: time passes up to each gradient before the exchange sees it, to the end of backward, in an update,
    and in a forward that is not trained on.

    Args:
        compute: or the seconds of a pass, which are spread over the parameters when they are known.
        plan: for which the cluster was made.
    """

    def __init__(self, compute: ComputeModel | float, pace: Pace, plan: str) -> None:
        self._compute = compute
        self._pace = pace
        self._plan = plan
        self._charged = 0.0
        self._rows = 0
        self.ends: list[float] = []
        """When each update ended, in virtual time."""
        self.traffic: list[Traffic] = []
        """Of the exchange of each step."""
        self.began = 0.0
        self.digest = ""
        """Of the parameters in the end."""
        self._woven: list[Woven] = []

    def __call__(self, event: ScriptEvent) -> None:
        match event:
            case PlanChosen(plan) if plan != self._plan:
                raise OtherPlanError(plan)
            case Woven():
                self._begin(event)
            case GradientReady(name, _):
                self._charge_up_to(self._model.ready.get(name, 1.0))
            case BackwardEnded():
                self._charge_up_to(1.0)
                self._charged = 0.0
            case UpdateEnded():
                self._pace.charge(self._model.seconds_per_update)
                self.ends.append(self._pace.now())
                self.traffic.append(self._sum_traffic())
                self._pace.begin_step(len(self.ends))
            case ForwardEnded(inputs):
                self._see_forward(num_rows(inputs))
            case ScriptEnded():
                self._end()
            case _:
                pass

    @property
    def _model(self) -> ComputeModel:
        assert isinstance(self._compute, ComputeModel), "nothing is computed before the script has woven"
        return self._compute

    def _begin(self, woven: Woven) -> None:
        if not self._woven:
            self.began = self._pace.now()
            self._pace.begin(0)
            self._pace.begin_step(0)
        self._woven.append(woven)
        if not isinstance(self._compute, ComputeModel):
            self._compute = spread_evenly(woven.parameters, self._compute)

    def _sum_traffic(self) -> Traffic:
        found = [woven.traffic() for woven in self._woven]
        return Traffic(sum(one.exposed for one in found), sum(one.hidden for one in found))

    def _see_forward(self, rows: int) -> None:
        if torch.is_grad_enabled():
            self._rows = rows
        else:  # it is as long as a forward in training, by its rows
            share = rows / self._rows if self._rows and rows else 1.0
            self._pace.charge(self._model.forward_share * self._model.seconds_per_pass * share)

    def _charge_up_to(self, share: float) -> None:
        if share > self._charged:
            self._pace.charge((share - self._charged) * self._model.seconds_per_pass)
            self._charged = share

    def _end(self) -> None:
        if not self._woven:
            return
        self._pace.end()
        self.digest = hash_woven(self._woven)


@dataclass
class TimedPass:
    """Real seconds from the first touch of a batch to each gradient and to the end of backward; and of the update."""

    ready: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    update: float = 0.0


@final
class StepTimes:
    """An observer: times the passes of one rank, in which it waits for nobody, and so computes alone."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._pass = TimedPass()
        self.passes: list[TimedPass] = []

    def __call__(self, event: ScriptEvent) -> None:
        now = time.perf_counter()
        match event:
            case BatchTaken():
                self._began = now
            case GradientReady(name, _):
                self._pass.ready[name] = now - self._began
            case BackwardEnded():
                self._pass.seconds = now - self._began
                self.passes.append(self._pass)
                self._pass = TimedPass()
            case UpdateBegan():
                self._began = now
            case UpdateEnded():
                if self.passes:
                    self.passes[-1].update = now - self._began
                self._began = now
            case _:
                pass


def model_of(passes: Sequence[TimedPass]) -> ComputeModel:
    """Medians, without the first passes."""
    steady = passes[NUM_WARM_UPS:] or passes
    if not steady:
        raise UsageError("script took no step that could be timed; give --compute-seconds")
    names = {name for one in steady for name in one.ready}
    ready = {
        name: min(1.0, median(one.ready[name] / one.seconds for one in steady if name in one.ready)) for name in names
    }
    updates = [one.update for one in steady if one.update]
    return ComputeModel(median(one.seconds for one in steady), 0.0, median(updates) if updates else 0.0, ready)


@final
class Stopper:
    """An observer that ends the script after some updates."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def __call__(self, event: ScriptEvent) -> None:
        if isinstance(event, UpdateEnded):
            self._left -= 1
            if self._left == 0:
                raise StepsDoneError
