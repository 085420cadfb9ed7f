"""Executors of the catalogue: those that need an extra say which, those that cannot train are refused in time."""

import sys

import pytest
import torch
from torch import nn

from weft.errors import RecipeError, UsageError
from weft.recipes import digits_mlp
from weft.training import build
from weft.training.build import EXECUTORS, FOR_INFERENCE, ON_ANY_DEVICE, TOLERANCES, check_recipe


@pytest.mark.parametrize(("executor", "package", "extra"), [("jax", "jax", "jax"), ("onnxruntime", "onnx", "onnx")])
def test_a_missing_extra_is_named(executor: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"weft.graph.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"executor {executor} needs a package \({package}\).*'weft\[{extra}\]'"):
        EXECUTORS[executor](nn.Linear(1, 1), nn.functional.mse_loss)


def test_an_executor_for_inference_cannot_train() -> None:
    recipe = digits_mlp().with_setting("executor", "onnxruntime")
    with pytest.raises(RecipeError, match="computes no gradients"):
        check_recipe(recipe)
    check_recipe(recipe, is_training=False)


def test_what_compiles_for_the_cpu_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_device", lambda wish: torch.device("cuda", 0))
    for name in EXECUTORS.keys() - FOR_INFERENCE:
        recipe = digits_mlp().with_setting("executor", name)
        if name in ON_ANY_DEVICE:
            check_recipe(recipe)
        else:
            with pytest.raises(RecipeError, match=rf"executor: {name}, device: cuda:0\); use executor=eager"):
                check_recipe(recipe)


def test_the_tables_name_executors() -> None:
    assert EXECUTORS.keys() > ON_ANY_DEVICE
    assert TOLERANCES.keys() <= EXECUTORS.keys() and EXECUTORS.keys() >= FOR_INFERENCE
