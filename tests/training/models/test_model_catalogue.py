"""What every model promises, and what each refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from weft.errors import RecipeError, UsageError
from weft.specs import TaskSpec, TensorSpec
from weft.training.component import Component, build
from weft.training.models import MODELS


def image(channels: int, height: int, width: int, num_outputs: int = 10) -> TaskSpec:
    return TaskSpec(TensorSpec((channels, height, width)), num_outputs)


def text(length: int, vocabulary: int) -> TaskSpec:
    return TaskSpec(TensorSpec((length,), torch.int64), vocabulary)


CASES: list[tuple[Component, TaskSpec]] = [
    (Component("mlp"), image(1, 8, 8)),
    (Component("mlp", hidden=(), dropout=0.5), TaskSpec(TensorSpec((7,)), 3)),
    (Component("mlp", hidden=(16, 8), dropout=0.2), image(3, 5, 4, 100)),
    (Component("lenet"), image(1, 8, 8)),
    (Component("lenet", channels1=6, channels2=8, hidden=20, dropout=0.3), image(1, 28, 28)),
    (Component("lenet"), image(3, 4, 7, 2)),
    (Component("resnet", depth=8, width=4), image(3, 32, 32)),
    (Component("vgg", channels=(2, 4), depth=1, hidden=8, dropout=0.3), image(1, 9, 5)),
    (Component("vgg", channels=(2, 3, 4), hidden=8, dropout=0.0, batch_norm=True), image(3, 32, 32, 100)),
    (Component("resnet", depth=14, width=4, shortcut="B"), image(1, 9, 11, 100)),
    (Component("char_lstm", hidden=16), text(12, 30)),
    (Component("char_lstm", hidden=16, embedding=8, num_layers=2, dropout=0.2), text(5, 3)),
    (Component("char_gpt", width=16), text(12, 30)),
    (Component("char_gpt", width=16, num_heads=2, num_layers=1, dropout=0.2, tied=False), text(5, 3)),
    (Component("char_moe", width=16, hidden=8, noisy=False), text(12, 30)),
    (Component("char_moe", width=16, num_experts=3, top_k=1, dropout=0.2, tied=False), text(9, 5)),
    (Component("field_net"), image(1, 16, 16, 256)),
    (Component("field_net", width=4, num_layers=1, kernel_size=3), image(1, 3, 5, 15)),
]
MODEL = pytest.mark.parametrize(("component", "task"), CASES, ids=[f"{c} on {t.input.shape}" for c, t in CASES])


def make(component: Component, task: TaskSpec) -> nn.Module:
    return build(component, MODELS, "model", task)


def inputs(task: TaskSpec, batch_size: int = 4) -> Tensor:
    shape = (batch_size, *task.input.shape)
    return torch.randn(shape) if task.input.dtype.is_floating_point else torch.randint(task.num_outputs, shape)


def test_every_model_is_tried() -> None:
    assert {component.name for component, _ in CASES} == set(MODELS)


@MODEL
def test_output_has_one_row_per_sample_or_token(component: Component, task: TaskSpec) -> None:
    rows = (4,) if task.input.dtype.is_floating_point else (4, *task.input.shape)
    assert make(component, task)(inputs(task)).shape == (*rows, task.num_outputs)


def silent_parameters(module: nn.Module, x: Tensor) -> list[str]:
    """The parameters that no gradient reaches."""
    (module(x) ** 2).sum().backward()
    return [name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()]


@MODEL
def test_gradient_reaches_every_parameter(component: Component, task: TaskSpec) -> None:
    assert silent_parameters(make(component, task), inputs(task, batch_size=16)) == []


def test_gradient_check_finds_a_parameter_without_one() -> None:
    module = make(*CASES[0])
    module.register_parameter("unused", nn.Parameter(torch.ones(1)))
    assert silent_parameters(module, inputs(CASES[0][1])) == ["unused"]


@MODEL
def test_evaluation_is_deterministic_and_each_sample_alone(component: Component, task: TaskSpec) -> None:
    module, x = make(component, task).eval(), inputs(task)
    with torch.no_grad():
        together = module(x)
        assert torch.equal(module(x), together)
        torch.testing.assert_close(module(x[:1]), together[:1], atol=1e-5, rtol=1e-5)


@MODEL
def test_dropout_is_alive_in_training_alone(component: Component, task: TaskSpec) -> None:
    module, x = make(component, task).train(), inputs(task)
    has_dropout = dict(component.options).get("dropout", 0) != 0 and dict(component.options).get("hidden") != ()
    assert torch.equal(module(x), module(x)) != has_dropout


@MODEL
def test_same_seed_builds_the_same_model(component: Component, task: TaskSpec) -> None:
    torch.manual_seed(3)
    first = make(component, task).state_dict()
    torch.manual_seed(3)
    second = make(component, task).state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("component", "task", "wrong"),
    [
        (Component("mlp"), image(1, 8, 8), torch.randn(2, 1, 8, 9)),
        (Component("lenet"), image(1, 8, 8), torch.randn(2, 1, 16, 16)),
        (Component("resnet", depth=8), image(3, 8, 8), torch.randn(2, 1, 8, 8)),
        (Component("field_net"), image(1, 8, 8, 64), torch.randn(2, 3, 8, 8)),
        (Component("char_lstm"), text(4, 9), torch.full((2, 4), 9)),
        (Component("char_gpt"), text(4, 9), torch.full((2, 4), 9)),
        (Component("char_moe"), text(4, 9), torch.full((2, 4), 9)),
    ],
    ids=lambda value: str(value) if isinstance(value, Component) else "",
)
def test_wrong_input_is_an_error(component: Component, task: TaskSpec, wrong: Tensor) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        make(component, task)(wrong)


@pytest.mark.parametrize(
    ("name", "options", "task", "fact"),
    [
        ("mpl", {}, image(1, 8, 8), "did you mean 'mlp'"),
        ("mlp", {}, text(4, 9), "mlp takes floating-point inputs"),
        ("mlp", {"hidden": (4, 0)}, image(1, 8, 8), r"must be positive \(hidden\[1\]: 0"),
        ("mlp", {"dropout": 1.0}, image(1, 8, 8), "dropout is a share"),
        ("lenet", {}, image(1, 3, 8), "at least 4 x 4"),
        ("lenet", {}, TaskSpec(TensorSpec((64,)), 10), r"lenet takes images .*float32 \(64,\)"),
        ("lenet", {"channels1": 0}, image(1, 8, 8), "must be positive"),
        ("char_moe", {"top_k": 9}, text(4, 9), r"more experts for a token .*--set model.top_k=8"),
        ("char_moe", {"balance": -1.0}, text(4, 9), "option is negative"),
        ("resnet", {"depth": 21}, image(3, 8, 8), r"6n \+ 2 \(depth: 21\); --set model.depth=20"),
        ("resnet", {"depth": 2}, image(3, 8, 8), "--set model.depth=8"),
        ("vgg", {}, image(3, 7, 9), "at least 8 x 8"),
        ("vgg", {"channels": (4, 0)}, image(3, 8, 8), "must be positive"),
        ("resnet", {"shortcut": "C"}, image(3, 8, 8), "unknown value"),
        ("resnet", {}, text(4, 9), "resnet takes images"),
        ("char_lstm", {}, image(1, 8, 8), "char_lstm takes sequences of tokens"),
        ("char_lstm", {"num_layers": 0}, text(4, 9), "must be positive"),
        ("char_gpt", {"width": 30}, text(4, 9), "heads do not divide the width"),
        ("char_gpt", {"dropout": -0.1}, text(4, 9), "dropout is a share"),
        ("field_net", {}, image(1, 8, 8, 10), "one of the same size"),
        ("field_net", {}, image(2, 8, 8, 64), "one of the same size"),
        ("field_net", {"kernel_size": 4}, image(1, 8, 8, 64), "no centre"),
    ],
)
def test_impossible_models_are_refused(name: str, options: dict[str, Any], task: TaskSpec, fact: str) -> None:
    with pytest.raises(RecipeError, match=fact):
        make(Component(name, **options), task)


def test_gpt_refuses_more_tokens_than_it_has_positions() -> None:
    with pytest.raises(UsageError, match=r"longer than the model's context \(length: 5, context: 4\)"):
        make(Component("char_gpt"), text(4, 9))(torch.zeros(1, 5, dtype=torch.int64))
