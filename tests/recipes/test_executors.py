"""Every built-in recipe through other executors: the losses of eager mode, to the bit or to a stated tolerance."""

from functools import cache

import pytest

from weft.errors import DataNotFoundError, UsageError
from weft.proving.executors import ExecutorProof, prove_executors
from weft.recipes import BUILT_IN
from weft.training.recipe import Recipe

# Smaller models, fewer data; a ResNet of CIFAR's kind on digits stands for those whose data are not here.
SMALL: dict[str, dict[str, str]] = {
    "digits_mlp": {},
    "digits_cnn": {},
    "fashion_cnn": {"batch_size": "16"},
    "fashion_vgg": {"data": "digits", "model.channels": "4,8", "model.hidden": "32", "batch_size": "16"},
    "cifar10_resnet20": {"data": "digits", "model.depth": "8", "model.width": "4", "batch_size": "16"},
    "cifar10_resnet44": {"data": "digits", "model.depth": "14", "model.width": "4", "batch_size": "16"},
    "pydoc_lstm": {"data.sequence_length": "12", "model.embedding": "8", "model.hidden": "16", "batch_size": "4"},
    "pydoc_gpt": {"data.sequence_length": "12", "model.width": "16", "model.num_heads": "2", "batch_size": "4"},
    "heat_regression": {"batch_size": "4"},
}
WITH_EXPERTS = {"pydoc_moe"}
"""How many tokens an expert gets is known only when they are there: their step is no graph of fixed shapes."""
over_recipes = pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - WITH_EXPERTS))


def test_every_recipe_is_here() -> None:
    assert SMALL.keys() | WITH_EXPERTS == BUILT_IN.keys()


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_not_captured_and_say_so(name: str) -> None:
    with pytest.raises(UsageError, match="shape depends on the values"):
        prove_executors(BUILT_IN[name](), "graph", "eager", num_steps=1)


@cache
def small(name: str) -> Recipe:
    recipe = BUILT_IN[name]()
    for key, value in SMALL[name].items():
        recipe = recipe.with_setting(key, value)
    return recipe


def prove(name: str, executor: str, num_steps: int) -> ExecutorProof:
    try:
        return prove_executors(small(name), executor, "eager", num_steps=num_steps)
    except DataNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@over_recipes
def test_the_graph_gives_the_bits_of_eager(name: str) -> None:
    proof = prove(name, "graph", num_steps=4)
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.slow
@pytest.mark.usefixtures("xla_cache")
@pytest.mark.parametrize(
    "name", sorted(BUILT_IN.keys() - {"fashion_cnn", "cifar10_resnet44", *WITH_EXPERTS})
)  # each has a twin, and XLA is slow
def test_xla_gives_the_losses_of_eager(name: str) -> None:
    proof = prove(name, "jax", num_steps=2)
    assert proof.passed and 0 < proof.largest_error < 1e-5, proof.finding


@pytest.mark.slow
@over_recipes
def test_onnx_runtime_evaluates_as_eager(name: str) -> None:
    proof = prove(name, "onnxruntime", num_steps=1)
    assert proof.passed and proof.largest_error < 1e-5, proof.finding
