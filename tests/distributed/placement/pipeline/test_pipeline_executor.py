"""The executor of a stage: skip connections, shapes that change, in-place layers, evaluation, waiting, refusals."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.pipeline.cases import (
    SCHEDULES,
    Skipping,
    execute,
    skipping_partition,
    train_alone,
)
from tests.distributed.placement.pipeline.plain_partition import cut_evenly
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.placement.chunks import Chunks
from weft.distributed.placement.pipeline import PipelineExecutor, make_pipeline
from weft.distributed.virtual import run_virtual
from weft.errors import PlanError, UsageError
from weft.graph import EagerExecutor, GraphExecutor
from weft.specs import Batch, parse_plan
from weft.training.losses import LOSSES
from weft.training.placement import WholeModel


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return make()

    return build


def layers(num: int = 6) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(num) for layer in (nn.Linear(4, 4), nn.Tanh())))


def batch_of(num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(num_samples)
    return Batch(
        (torch.randn(num_samples, 4, generator=generator),), (torch.randn(num_samples, 4, generator=generator),)
    )


def build_executor(group: AbstractGroup, plan: str, make: Callable[[], nn.Module] = layers) -> PipelineExecutor:
    chosen = parse_plan(plan)
    placement = make_pipeline(MeshGroups(group, chosen.mesh(group.rank)), chosen, WholeModel(), cut_evenly)
    executor = placement.execute(placement.place(seeded(make)()), LOSSES["mse"](), EagerExecutor)
    assert isinstance(executor, PipelineExecutor)
    return executor


@pytest.mark.parametrize("schedule", ["gpipe(4)", "1f1b(4)", "zero_bubble(4)"])
def test_values_go_straight_to_their_consumers(schedule: str) -> None:
    """`h` goes to the second stage, which works on it in place, and to the third; a mask goes without a gradient."""
    batches = [batch_of(8), batch_of(6)]
    (alone, *_), *_ = expected = train_alone(seeded(Skipping)(), batches)
    ranks = execute(seeded(Skipping), skipping_partition, f"pipeline=3 schedule={schedule}", batches)
    assert ranks[2][0][0] == pytest.approx(alone) and ranks[0][0][0] == 0
    for number, (_, gradients, predictions) in enumerate(expected):
        found = {name: gradient for rank in ranks for name, gradient in rank[number][1].items()}
        torch.testing.assert_close(found, gradients)
        torch.testing.assert_close(ranks[2][number][2], predictions)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_may_change_from_step_to_step(schedule: str) -> None:
    batches = [batch_of(size) for size in (8, 9, 3, 8, 1)]
    expected = train_alone(seeded(layers)(), batches)
    ranks = execute(seeded(layers), cut_evenly, f"pipeline=2 schedule={schedule}", batches)
    for number, (loss, gradients, _) in enumerate(expected):
        assert ranks[1][number][0] == pytest.approx(loss)
        torch.testing.assert_close(ranks[0][number][1] | ranks[1][number][1], gradients)


def test_a_shape_is_announced_once_and_values_travel_alone() -> None:
    """4 micro-batches of 2 samples of 4 floats: 32 bytes each, one header of 16 whole numbers, and one that says that
    no random state travels."""

    def program(group: AbstractGroup) -> list[int]:
        executor = build_executor(recording := RecordingGroup(group), "pipeline=2 schedule=1f1b(4)")
        state, sent = executor.initial_state(), []
        for _ in range(3):
            before = recording.traffic.bytes_sent
            _, state = executor(state, batch_of(8), lambda name, gradient: None)
            sent.append(recording.traffic.bytes_sent - before)
        return sent

    first, last = run_virtual(program, 2).results
    assert first == [4 * 32 + 2 * 128, 4 * 32, 4 * 32] and last == [4 * 32] * 3


def test_every_gradient_is_handed_over_once_the_last_chunks_first() -> None:
    def program(group: AbstractGroup) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
        executor = build_executor(group, "pipeline=2 schedule=interleaved(4,chunks=2)")
        seen: list[str] = []
        executor(executor.initial_state(), batch_of(8), lambda name, gradient: seen.append(name))
        return seen, executor.chunks

    for seen, (first, last) in run_virtual(program, 2).results:
        assert set(seen[: len(last)]) == set(last) and set(seen[len(last) :]) == set(first)
        assert len(seen) == len(first) + len(last)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_goes_through_all_stages(schedule: str) -> None:
    batch = batch_of(9)

    def program(group: AbstractGroup) -> tuple[float, Tensor]:
        executor = build_executor(group, f"pipeline=2 schedule={schedule}")
        outputs = executor.infer(executor.initial_state(), batch)
        return outputs.loss.item(), outputs.predictions

    module = seeded(layers)()
    expected = module(batch.inputs[0])
    (_, (loss, predictions)) = run_virtual(program, 2).results
    torch.testing.assert_close(predictions, expected.detach())
    assert loss == pytest.approx(LOSSES["mse"]()(expected, *batch.targets).item())


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("gpipe(8)", 3 / 11), ("1f1b(8)", 3 / 11), ("interleaved(8,chunks=2)", 3 / 19), ("zero_bubble(8)", 3 / 27)],
)
def test_the_bubble_that_is_measured_is_that_of_the_formula(schedule: str, share: float) -> None:
    """In virtual time, where a forward pass takes 1 s and a backward pass 2 s. At the end a stage has no more to wait
    for; so every stage's own time ends at its own last action, and the mean over stages lies below the formula's."""
    chunks = 2 if "chunks" in schedule else 1
    cost = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}

    def program(group: AbstractGroup) -> tuple[float, float]:
        executor = build_executor(group, f"pipeline=4 schedule={schedule}", lambda: layers(8))
        executor.charge_with(lambda action, _: group.clock.charge(cost[action.kind] / chunks))
        executor(executor.initial_state(), batch_of(8), lambda name, gradient: None)
        return executor.bubble.seconds, executor.bubble.waited

    found = run_virtual(program, 4).results
    longest = max(seconds for seconds, _ in found)
    idle = [waited + longest - seconds for seconds, waited in found]
    assert sum(idle) / (4 * longest) == pytest.approx(share, rel=0.01)


def test_a_rank_with_several_chunks_knows_its_layers_by_their_own_names() -> None:
    model = seeded(layers)()
    found = Chunks([p.module for p in cut_evenly(model, (torch.zeros(1, 4),), 6).stages[::2]])
    names = [name for name, _ in found.named_parameters()]
    assert names == ["0.weight", "0.bias", "4.weight", "4.bias", "8.weight", "8.bias"]
    assert found.get_submodule("4") is model[4]  # type: ignore[index]
    with pytest.raises(AttributeError, match="no chunk has"):
        found.get_submodule("2")


# ---- refusals


class Growing(nn.Module):
    """Gives something longer every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x).repeat(self.calls, 1)
        return out


def test_a_value_whose_shape_hangs_on_more_than_the_inputs_is_refused() -> None:
    with pytest.raises(UsageError, match=r"another form .*h1, was: float32 \[2, 4\], is: float32 \[4, 4\]"):
        execute(lambda: nn.Sequential(Growing(), nn.Linear(4, 4)), cut_evenly, "pipeline=2", [batch_of(16)])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match=r"more stages than layers \(stages: 4, layers: 2\)"):
        execute(lambda: layers(2), cut_evenly, "pipeline=2 schedule=interleaved(4,chunks=2)", [batch_of(8)])


def test_a_stage_without_parameters_is_refused() -> None:
    def careless(module: nn.Module, inputs: tuple[Tensor, ...], num_stages: int) -> object:
        found = cut_evenly(module, inputs, num_stages)
        return type(found)((found.stages[0], *cut_evenly(nn.Sequential(nn.Tanh()), inputs, 1).stages), {})

    with pytest.raises(PlanError, match=r"stage has no parameters \(stage: 1, chunk: 0"):
        execute(layers, careless, "pipeline=2", [batch_of(8)])  # type: ignore[arg-type]


def test_fewer_micro_batches_than_stages_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"fewer micro-batches than stages.*micro-batches: 2, stages: 3"):
        execute(layers, cut_evenly, "pipeline=3 schedule=1f1b(2)", [batch_of(8)])


def test_an_executor_that_cannot_stop_between_stages_is_refused() -> None:
    def program(group: AbstractGroup) -> None:
        plan = parse_plan("pipeline=2")
        placement = make_pipeline(MeshGroups(group, plan.mesh(group.rank)), plan, WholeModel(), cut_evenly)
        placement.execute(placement.place(layers()), LOSSES["mse"](), GraphExecutor)

    with pytest.raises(PlanError, match="computed eagerly"):
        run_virtual(program, 2)


def test_the_first_value_that_is_not_finite_is_named() -> None:
    class Breaking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    def program(group: AbstractGroup) -> str | None:
        executor = build_executor(group, "pipeline=2", lambda: nn.Sequential(Breaking(4, 4), nn.Linear(4, 4)))
        _, state = executor(executor.initial_state(), batch_of(8), lambda name, gradient: None)
        return executor.first_bad_tensor(state, batch_of(8))

    assert run_virtual(program, 2).results == (None, "h1, from a stage before")
