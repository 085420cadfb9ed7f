"""The cost of computation in virtual time: a step as data, charged gradient by gradient or action by action.

A rank's own time, and the network's, of a step with two buckets:

    rank      [forward    ][layer 3][layer 2][layer 1]...waits...[update]
    charged               ^        ^        ^        ^                  ^
    network                  bucket 0 =====>    bucket 1 =======>
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from weft.distributed.group.clock import AbstractClock
from weft.distributed.placement.pipeline import Action, PipeDreamExecutor, PipelineExecutor
from weft.distributed.placement.pipeline.actions import Kind
from weft.errors import UsageError
from weft.graph import AbstractExecutor, GradientSink, Outputs, State
from weft.specs import Batch
from weft.training.loop import Task
from weft.training.optimizers import AbstractOptimizer, AbstractOptimizerWrapper, OptimizerState, WholeNorms

__all__ = ["ActionCharges", "ChargingExecutor", "ChargingOptimizer", "ComputeModel", "charge_task", "spread_evenly"]

FORWARD_SHARE = 1 / 3
"""Of a pass, where nothing was measured: backward computes two products for each one of forward."""


@dataclass(frozen=True)
class ComputeModel:
    """Seconds of a rank's computation. A pass is a forward and a backward of one batch.

    `ready` holds, for each parameter, the share of a pass after which its gradient is complete. `seconds_per_update` is
    of all parameters; a rank that updates some of them takes their share.

    >>> ComputeModel(seconds_per_pass=0.25, seconds_per_sample=0.5, seconds_per_update=0.0, ready={}).seconds(3)
    1.75
    """

    seconds_per_pass: float
    seconds_per_sample: float
    seconds_per_update: float
    ready: Mapping[str, float]

    def __post_init__(self) -> None:
        seconds = (self.seconds_per_pass, self.seconds_per_sample, self.seconds_per_update)
        if not all(number >= 0 for number in seconds):
            raise UsageError(f"computation takes less than no time (seconds: {seconds}); give 0 or more")
        wrong = [name for name, share in self.ready.items() if not 0 < share <= 1]
        if wrong:
            raise UsageError(
                f"gradient is ready outside its pass (parameter: {wrong[0]}, share: {self.ready[wrong[0]]}); "
                "give shares above 0, up to 1"
            )

    def seconds(self, num_samples: int) -> float:
        return self.seconds_per_pass + num_samples * self.seconds_per_sample

    @property
    def forward_share(self) -> float:
        """Forward is over, at the latest, when the first gradient is ready."""
        return min(self.ready.values(), default=FORWARD_SHARE)

    def share_of(self, names: Iterable[str]) -> float:
        """Of a pass, the share that layers with these parameters take: by the time that their gradients take."""
        begin, shares = self._backward_begins, dict[str, float]()
        for name, end in sorted(self.ready.items(), key=lambda item: item[1]):
            shares[name] = (end - begin) / (1 - self._backward_begins)
            begin = end
        return sum(shares.get(name, 0.0) for name in names)

    def seconds_of(self, kind: Kind, num_samples: int) -> float:
        """Of an action of a pipeline, if one stage had all layers."""
        forward = self._backward_begins
        backward = 1 - forward
        halves = {"backward_input": backward / 2, "backward_weight": backward / 2}
        return {"forward": forward, "backward": backward, **halves}[kind] * self.seconds(num_samples)

    @property
    def _backward_begins(self) -> float:
        return min(FORWARD_SHARE, self.forward_share)

    def __str__(self) -> str:
        return (
            f"{self.seconds_per_pass:.6g} s per pass, {self.seconds_per_sample:.6g} s per sample, "
            f"{self.seconds_per_update:.6g} s per update"
        )


def spread_evenly(parameters: Mapping[str, Tensor], seconds: float) -> ComputeModel:
    """A step of so many seconds, whatever its batch; backward goes through the parameters from the last to the first,
    as long in each as it has elements. The update is free.

    >>> import torch
    >>> spread_evenly({"first": torch.zeros(3), "last": torch.zeros(1)}, 0.6).ready
    {'last': 0.5, 'first': 1.0}
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad} or parameters
    total = sum(parameter.numel() for parameter in trained.values())
    ready, done = {}, 0
    for name, parameter in reversed(list(trained.items())):
        done += parameter.numel()
        ready[name] = min(1.0, FORWARD_SHARE + (1 - FORWARD_SHARE) * done / total)  # rounding may exceed 1
    return ComputeModel(seconds, 0.0, 0.0, ready)


def charge_task(task: Task, model: ComputeModel, clock: AbstractClock) -> Task:
    """The task, its passes and updates charged to the clock; those of a stage action by action."""
    if isinstance(task.executor, PipelineExecutor | PipeDreamExecutor):
        shares = [model.share_of(names) for names in task.executor.chunks]
        task.executor.charge_with(ActionCharges(model, shares, clock))
        own = replace(model, seconds_per_update=model.seconds_per_update * sum(shares))
        return replace(task, optimizer=ChargingOptimizer(task.optimizer, own, clock))
    num_elements = sum(parameter.numel() for parameter in task.executor.initial_state().parameters.values())
    return replace(
        task,
        executor=ChargingExecutor(task.executor, model, clock),
        optimizer=ChargingOptimizer(task.optimizer, model, clock, num_elements),
    )


@final
class ActionCharges:
    """Lets the time of a stage's actions pass.

    Args:
        shares: of a pass, that each chunk of the stage takes.
    """

    def __init__(self, model: ComputeModel, shares: Sequence[float], clock: AbstractClock) -> None:
        self._model = model
        self._shares = shares
        self._clock = clock

    def __call__(self, action: Action, num_samples: int) -> None:
        self._clock.charge(self._shares[action.chunk] * self._model.seconds_of(action.kind, num_samples))


@final
class ChargingExecutor(AbstractExecutor):
    """Wraps any executor: time passes up to each gradient before the sink sees it, and to the end of the pass."""

    def __init__(self, inner: AbstractExecutor, model: ComputeModel, clock: AbstractClock) -> None:
        self._inner = inner
        self._model = model
        self._clock = clock

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        seconds = self._model.seconds(len(batch))
        charged = 0.0

        def charge_up_to(share: float) -> None:
            nonlocal charged
            if share > charged:
                self._clock.charge((share - charged) * seconds)
                charged = share

        def sink(name: str, gradient: Tensor | None) -> None:
            charge_up_to(self._model.ready.get(name, 1.0))
            on_gradient(name, gradient)

        outputs, after = self._inner(state, batch, sink)
        charge_up_to(1.0)
        return outputs, after

    def infer(self, state: State, batch: Batch) -> Outputs:
        outputs = self._inner.infer(state, batch)
        self._clock.charge(self._model.forward_share * self._model.seconds(len(batch)))
        return outputs

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._inner.first_bad_tensor(state, batch)


@final
class ChargingOptimizer(AbstractOptimizerWrapper):
    """Wraps any optimizer: an update takes its time by the elements that it updates.

    Args:
        num_elements: of all parameters, whose update takes the model's time; by default of those that are given.
    """

    def __init__(
        self, inner: AbstractOptimizer, model: ComputeModel, clock: AbstractClock, num_elements: int | None = None
    ) -> None:
        super().__init__(inner)
        self._model = model
        self._clock = clock
        self._num_elements = num_elements

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        after = self._inner.update(gradients, parameters, state, lr, whole_norms)
        updated = sum(gradient.numel() for gradient in gradients.values() if gradient is not None)
        total = self._num_elements or sum(parameter.numel() for parameter in parameters.values())
        self._clock.charge(self._model.seconds_per_update * updated / max(1, total))
        return after
