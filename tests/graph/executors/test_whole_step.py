"""The whole step as one program: the bits of eager mode and an optimizer, step after step."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.graph.contract import clone
from tests.graph.executors.test_built_in_models import IMAGE, SUBJECTS, assert_bits, cross_entropy, draw
from weft.graph import EagerExecutor, GraphExecutor, State, WholeStep
from weft.specs import Batch
from weft.training.models import MODELS
from weft.training.optimizers import OPTIMIZERS, Optimizer
from weft.training.replicas import Update
from weft.training.whole_step import StepInOne, step_in_one

LR = 0.05


def both(
    module: nn.Module, optimizer: Any, folder: Path, *, clip_norm: float | None = None, **options: Any
) -> tuple[EagerExecutor, StepInOne, list[State]]:
    eager = EagerExecutor(module, cross_entropy, **{k: v for k, v in options.items() if k == "autocast"})
    graph = GraphExecutor(copy.deepcopy(module), cross_entropy, folder=folder, **options)
    states = [eager.initial_state(), graph.initial_state()]
    whole = step_in_one(graph, optimizer, states[1], clip_norm)
    assert whole is not None
    return eager, whole, states


def check_ten_steps(
    module: nn.Module, name: str, batches: list[Batch], folder: Path, *, clip_norm: float | None = None, **options: Any
) -> None:
    optimizer = OPTIMIZERS[name](lr=LR)
    eager, whole, states = both(module, optimizer, folder, clip_norm=clip_norm, **options)
    slots = [optimizer.init(state.parameters) for state in states]
    for batch in batches:
        gradients: dict[str, Tensor | None] = {}
        outputs, states[0] = eager(states[0], batch, gradients.__setitem__)
        slots[0] = Update(optimizer, states[0].parameters, slots[0], LR, clip_norm).apply(gradients)
        loss, states[1], slots[1] = whole(states[1], slots[1], batch, LR)
        assert loss == outputs.loss.item()
        assert_bits(clone(states[1]), clone(states[0]))
        assert_bits(slots[1].slots, slots[0].slots)
        assert slots[1].shared.step.item() == slots[0].shared.step.item()


@pytest.mark.parametrize("name", SUBJECTS)
def test_ten_steps_have_the_bits_of_eager(name: str, tmp_path: Path) -> None:
    task, build = SUBJECTS[name]
    batches = [draw(task, step, num_samples=3 if step == 6 else 5) for step in range(10)]  # a ragged one in between
    check_ten_steps(build(), "momentum", batches, tmp_path)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"torch"}))
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_every_rule_is_captured_to_the_bit(name: str, clip_norm: float | None, tmp_path: Path) -> None:
    module = MODELS["mlp"](IMAGE, hidden=(8,))
    batches = [draw(IMAGE, step, num_samples=4) for step in range(10)]
    check_ten_steps(module, name, batches, tmp_path, clip_norm=clip_norm)


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt"])
def test_autocast_has_the_bits_of_eager(name: str, tmp_path: Path) -> None:
    task, build = SUBJECTS[name]
    batches = [draw(task, step, num_samples=4) for step in range(4)]
    check_ten_steps(build(), "momentum", batches, tmp_path, autocast=torch.bfloat16)


def test_a_loss_that_is_not_finite_changes_no_parameter(tmp_path: Path) -> None:
    module = MODELS["mlp"](IMAGE, hidden=(8,))
    optimizer = OPTIMIZERS["adam"](lr=LR)
    _, whole, (_, state) = both(module, optimizer, tmp_path)
    slots = optimizer.init(state.parameters)
    batch = draw(IMAGE, 0, num_samples=4)
    _, state, slots = whole(state, slots, batch, LR)
    before = clone(dict(state.parameters)), clone(dict(slots.slots["1.weight"])), slots.shared.step.item()
    loss, state, slots = whole(state, slots, Batch((torch.full((4, 1, 8, 8), torch.nan),), batch.targets), LR)
    assert loss != loss
    assert_bits(clone(dict(state.parameters)), before[0])
    assert_bits(clone(dict(slots.slots["1.weight"])), before[1])
    assert slots.shared.step.item() == before[2]


def test_a_state_from_elsewhere_is_taken_up(tmp_path: Path) -> None:
    module, batch = MODELS["mlp"](IMAGE, hidden=(8,)), draw(IMAGE, 0, num_samples=4)
    optimizer = OPTIMIZERS["momentum"](lr=LR)
    _, whole, (_, state) = both(module, optimizer, tmp_path)
    start = clone(state), clone(dict(optimizer.init(state.parameters).slots))
    losses = []
    for _ in range(2):  # the second time with copies, as after a checkpoint was read
        state, slots = clone(start[0]), optimizer.init(start[0].parameters)
        for _ in range(3):
            loss, state, slots = whole(state, slots, batch, LR)
            losses.append(loss)
    assert losses[:3] == losses[3:]


def test_what_is_not_trained_stays(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Linear(10, 10))
    module[1].weight.requires_grad_(False)
    check_ten_steps(module, "momentum", [draw(IMAGE, step, num_samples=4) for step in range(3)], tmp_path)


def test_a_tensor_of_the_batch_that_is_in_the_state_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    whole = WholeStep(module, nn.functional.mse_loss, lambda g, p, m, s: ({}, m), folder=tmp_path)
    state = State(dict(module.named_parameters()), {}, torch.get_rng_state())
    batch = Batch((module.weight.detach(),), (module.weight,))
    with pytest.raises(ValueError, match="also in the state"):
        whole(state, {}, batch, ())


def test_only_what_compiles_takes_the_update_in() -> None:
    module = nn.Linear(2, 2)
    graph, eager = GraphExecutor(module, cross_entropy), EagerExecutor(module, cross_entropy)
    other = GraphExecutor(module, cross_entropy, make_program=lambda graph, sunk: pytest.fail("not needed"))
    momentum, foreign = OPTIMIZERS["momentum"](), OPTIMIZERS["torch"](name="SGD", lr=0.1)
    state = graph.initial_state()
    assert isinstance(step := step_in_one(graph, momentum, state, None), StepInOne)
    assert step.stands_for(graph, momentum) and not step.stands_for(eager, momentum)
    for executor, optimizer in ((eager, momentum), (graph, foreign), (other, momentum)):
        assert step_in_one(executor, optimizer, state, None) is None


def test_a_rule_that_looks_ahead_keeps_its_step_in_two() -> None:
    class AheadRule(type(OPTIMIZERS["sgd"]().rule)):  # type: ignore[misc]
        def prepare_param(self, parameter: Tensor, slots: Any, shared: Any) -> Tensor:
            return parameter + 1

    graph = GraphExecutor(nn.Linear(2, 2), cross_entropy)
    assert step_in_one(graph, Optimizer(AheadRule(), lr=0.1), graph.initial_state(), None) is None


@pytest.mark.slow
def test_a_fused_step_comes_near_eager(tmp_path: Path) -> None:
    task, build = IMAGE, partial(MODELS["mlp"], IMAGE, hidden=(512,))
    module, optimizer = build(), OPTIMIZERS["momentum"](lr=LR)
    eager, whole, states = both(module, optimizer, tmp_path, fused=True)
    slots = [optimizer.init(state.parameters) for state in states]
    for step in range(3):
        batch = draw(task, step, num_samples=64)
        gradients: dict[str, Tensor | None] = {}
        _, states[0] = eager(states[0], batch, gradients.__setitem__)
        slots[0] = optimizer.update(gradients, states[0].parameters, slots[0], LR)
        _, states[1], slots[1] = whole(states[1], slots[1], batch, LR)
    assert "region_" in next(tmp_path.glob("step-*.py")).read_text()
    for name, parameter in states[0].parameters.items():
        torch.testing.assert_close(states[1].parameters[name], parameter, rtol=1e-5, atol=1e-6)
