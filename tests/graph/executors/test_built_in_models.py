"""Every built-in model through the graph executor: the bits of the eager one, step after step."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.graph.contract import clone, take
from weft.graph import EagerExecutor, GraphExecutor
from weft.recipes import BUILT_IN
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.build import build_splits, build_task, check_recipe
from weft.training.component import Component
from weft.training.evaluation import evaluate
from weft.training.loop import take_step
from weft.training.models import MODELS
from weft.training.optimizers import OPTIMIZERS

IMAGE = TaskSpec(TensorSpec((1, 8, 8)), 10)
TEXT = TaskSpec(TensorSpec((12,), torch.int64), 20)

SUBJECTS: dict[str, tuple[TaskSpec, Callable[[], nn.Module]]] = {
    "mlp": (IMAGE, partial(MODELS["mlp"], IMAGE, hidden=(16,), dropout=0.2)),
    "lenet": (IMAGE, partial(MODELS["lenet"], IMAGE, channels1=4, channels2=6, hidden=16, dropout=0.5)),
    "resnet": (IMAGE, partial(MODELS["resnet"], IMAGE, depth=8, width=4)),
    "resnet B": (IMAGE, partial(MODELS["resnet"], IMAGE, depth=8, width=4, shortcut="B")),
    "lstm": (TEXT, partial(MODELS["char_lstm"], TEXT, embedding=8, hidden=16, num_layers=2, dropout=0.1)),
    "gpt": (TEXT, partial(MODELS["char_gpt"], TEXT, width=16, num_heads=2)),
    "gpt dropout": (TEXT, partial(MODELS["char_gpt"], TEXT, width=16, num_heads=2, dropout=0.1)),
}


def draw(task: TaskSpec, seed: int, num_samples: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, *task.input.shape)
    if task.input.dtype.is_floating_point:
        labels = torch.randint(task.num_outputs, (num_samples,), generator=generator)
        return Batch((torch.randn(shape, generator=generator),), (labels,))
    tokens = torch.randint(task.num_outputs, (num_samples, task.input.shape[0] + 1), generator=generator)
    return Batch((tokens[:, :-1],), (tokens[:, 1:],))  # two views of one memory, as the text data sets give them


def cross_entropy(predictions: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(predictions.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("name", SUBJECTS)
def test_ten_steps_have_the_bits_of_eager(name: str) -> None:
    task, build = SUBJECTS[name]
    module = build()
    executors = EagerExecutor(module, cross_entropy), GraphExecutor(copy.deepcopy(module), cross_entropy)
    optimizer = OPTIMIZERS["momentum"](lr=0.05)
    states = [executor.initial_state() for executor in executors]
    slots = [optimizer.init(state.parameters) for state in states]
    for step in range(10):
        batch = draw(task, step, num_samples=3 if step == 6 else 5)  # a ragged one in between
        found = []
        for i, executor in enumerate(executors):
            outputs, gradients, states[i] = take(executor, states[i], batch)
            slots[i] = optimizer.update(gradients, states[i].parameters, slots[i], 0.05)
            found.append(clone((outputs, gradients, states[i])))
        assert_bits(found[1], found[0])
    assert_bits(executors[1].infer(states[1], batch), executors[0].infer(states[0], batch))


def assert_bits(found: object, expected: object) -> None:
    """Equal to the bit, in type and strides too."""
    for one, other in zip(tensors_in(found), tensors_in(expected), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value) for tensor in tensors_in(value[key])]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [] if value is None else tensors_in(vars(value))


def test_a_wrong_bit_is_found() -> None:
    one = torch.ones(3)
    with pytest.raises(AssertionError):
        assert_bits({"a": one}, {"a": one + 1e-7})


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_autocast_has_the_bits_of_eager(name: str) -> None:
    task, build = SUBJECTS[name]
    module, found = build(), []
    for executor in (
        EagerExecutor(module, cross_entropy, autocast=torch.bfloat16),
        GraphExecutor(copy.deepcopy(module), cross_entropy, autocast=torch.bfloat16),
    ):
        outputs, gradients, state = take(executor, executor.initial_state(), draw(task, 0, num_samples=4))
        found.append(clone((outputs, gradients, executor.infer(state, draw(task, 1, num_samples=4)))))
    assert found[0][0].predictions.dtype == torch.bfloat16
    assert_bits(found[1], found[0])


@pytest.mark.parametrize("name", ["digits_mlp", "digits_cnn"])
def test_a_recipe_trains_to_the_bits_of_eager(name: str) -> None:
    recipe = BUILT_IN[name]()
    splits = build_splits(recipe)
    found = []
    for executor in ("eager", "graph"):
        chosen = replace(recipe, mutable=replace(recipe.mutable, executor=Component(executor)))
        check_recipe(chosen)
        task, state = build_task(chosen, splits, seed=0)
        losses = []
        for _ in range(8):
            state, result = take_step(task, state)
            losses.append(result.loss)
        scores = evaluate(task.executor, state.model, splits.validation, task.metrics)
        found.append((losses, scores, clone(state.model)))
    assert found[0][:2] == found[1][:2]
    assert_bits(found[1][2], found[0][2])
