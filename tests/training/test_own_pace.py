"""The loop on a rank that goes at its own pace: it evaluates nothing, and hears of the end without a collective."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor

from tests.training.planted import Recorder, build_tiny, clock_of_ticks, ignore, module_with_dropout
from weft.graph import GradientSink, State
from weft.metrics.metric import Rule
from weft.specs import Mesh
from weft.training.checkpoint import Entry
from weft.training.events import EvaluationEnded, EvaluationStarted
from weft.training.loop import train
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Consensus, SoloReplicas, Traffic, Update


@final
class Worker(AbstractReplicas):
    """Rank 1 of 2, alone for this test: what is collective must not be called."""

    def __init__(self, last_step: int) -> None:
        self._inner = SoloReplicas()
        self._steps_left = last_step

    @property
    def mesh(self) -> Mesh:
        return Mesh(1, data=2)

    @property
    def is_synchronous(self) -> bool:
        return False

    def join(self, model: State) -> None:
        raise AssertionError("collective")

    def next_step(self, step: int) -> int:
        return step

    def share(self, indices: Tensor) -> Tensor:
        return indices[len(indices) // 2 :]

    def begin(self, weight: float) -> GradientSink:
        return self._inner.begin(weight)

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        self._steps_left -= 1
        return self._inner.finish(loss, update)

    def traffic(self) -> Traffic:
        return Traffic()

    def agree_to_stop(self, wish: bool) -> bool:
        return self._steps_left == 0

    def agree_to_save(self, wish: bool) -> bool:
        return wish

    def dismiss(self) -> None:
        pass

    def sum(self, tensor: Tensor) -> Tensor:
        raise AssertionError("collective")

    def gather(self, tensor: Tensor) -> tuple[Tensor, ...]:
        raise AssertionError("collective")

    def collect(self, state: OptimizerState) -> OptimizerState:
        raise AssertionError("collective")

    def cut_of(self, name: str) -> None:
        raise AssertionError("there is no checkpoint")

    def use_consensus(self, model: State) -> AbstractContextManager[Consensus]:
        return nullcontext(Consensus(None))

    def memory(self) -> Mapping[str, Entry]:
        return {}

    def remember(self, step: int, entries: Mapping[str, Entry]) -> None:
        pass


def test_a_worker_trains_without_a_collective_and_stops_when_it_is_told() -> None:
    recorder = Recorder()
    task, state = build_tiny(
        module_with_dropout, replicas=Worker(last_step=5), epochs=4.0, evaluate_every=4, target=Rule("loss", 1e9)
    )
    final_state, reason = train(task, state, emit=recorder, save=ignore, clock=clock_of_ticks())
    assert (final_state.step, reason) == (5, "another rank wished to stop")
    kinds = [type(event) for event in recorder.events]
    assert EvaluationStarted in kinds and EvaluationEnded not in kinds
    assert not final_state.target_met and final_state.evaluated > 0
