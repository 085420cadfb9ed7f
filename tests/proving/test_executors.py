"""Proofs between executors: those that are right pass, planted faults are found and named."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from weft.errors import RecipeError, UsageError
from weft.proving.executors import ExecutorProof, prove_executors, tolerance_of
from weft.recipes import digits_mlp
from weft.specs import parse_plan
from weft.training.component import Component
from weft.training.recipe import Recipe
from weft.training.whole_step import StepInOne

PLANTED = "tests.proving.planted_executors"


@cache
def tiny(**settings: str) -> Recipe:
    recipe = digits_mlp()
    for key, value in {"model.hidden": "16,8", "batch_size": "24", **settings}.items():
        recipe = recipe.with_setting(key, value)
    return recipe


def against_eager(executor: str, recipe: Recipe | None = None, **options: float) -> ExecutorProof:
    return prove_executors(recipe or tiny(), executor, "eager", num_steps=2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["eager", "graph", "tape"])
def test_executors_of_the_same_bits_are_proven(executor: str) -> None:
    proof = against_eager(executor)
    assert proof.passed and proof.is_bitwise and proof.tolerance == 0
    assert proof.finding == (
        f"{executor} gave the losses, gradients and parameters of eager at each of 2 steps, to the last bit"
    )


def test_micro_batches_dropout_and_clipping_are_compared_too() -> None:
    recipe = tiny(**{"accumulate": "3", "model.dropout": "0.3", "clip_norm": "0.1"})
    assert against_eager("graph", recipe).is_bitwise
    assert against_eager("reference", recipe).passed


def test_the_reference_is_met_to_its_tolerance() -> None:
    for pair in (("reference", "eager"), ("eager", "reference"), ("graph", "reference")):
        proof = prove_executors(tiny(), *pair, num_steps=2)
        assert proof.passed and not proof.is_bitwise and 0 < proof.largest_error < proof.tolerance == 2e-5


def test_a_tolerance_that_is_too_tight_names_an_operator() -> None:
    proof = against_eager("reference", tolerance=1e-9)
    assert not proof.passed and proof.operator is not None
    assert 1e-9 < proof.operator.error < 1e-5


@pytest.mark.usefixtures("xla_cache")
def test_xla_is_met_to_its_tolerance() -> None:
    proof = against_eager("jax")
    assert proof.passed and 0 < proof.largest_error < 2e-6


def test_a_wrong_operator_is_named_with_step_and_error() -> None:
    proof = against_eager(f"{PLANTED}:one_operator")
    assert not proof.passed and proof.operator is not None
    assert proof.operator.target == "aten.threshold_backward" and proof.operator.error > 0
    assert proof.finding.startswith("at step 1, gradient ") and str(proof.operator) in proof.finding


def test_a_wrong_operator_is_named_within_a_tolerance() -> None:
    proof = prove_executors(tiny(), f"{PLANTED}:one_operator", "reference", num_steps=1)
    assert not proof.passed and proof.operator is not None and proof.operator.target == "aten.threshold_backward"


def test_a_fault_outside_the_operators_is_not_blamed_on_one() -> None:
    proof = against_eager(f"{PLANTED}:scaled_gradient")
    assert not proof.passed and proof.operator is None
    assert "bias" in proof.finding and "each operator alone agrees" in proof.finding
    assert proof.largest_error == pytest.approx(0.01, rel=1e-3)


def test_a_lost_gradient_is_found() -> None:
    proof = against_eager(f"{PLANTED}:lost_gradient")
    assert not proof.passed and "bias" in proof.finding and proof.largest_error == float("inf")


def test_a_state_that_is_not_followed_is_found_at_the_second_step() -> None:
    for tolerance in (0.0, 1e-6):
        proof = against_eager(f"{PLANTED}:stale_parameters", tolerance=tolerance)
        assert not proof.passed and proof.finding.startswith("at step 2, ")


def test_an_update_that_is_wrong_in_the_graph_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are right, but `weft run` has the update in the graph: that training is compared too."""
    right: Any = StepInOne.__call__
    monkeypatch.setattr(StepInOne, "__call__", lambda self, *inputs: right(self, *inputs[:3], 1.01 * inputs[3]))
    proof = against_eager("graph")
    assert not proof.passed and proof.operator is None
    assert proof.finding.startswith("at step 1, parameter ")


def test_running_statistics_are_compared() -> None:
    fixed = replace(digits_mlp().fixed, model=Component("resnet", depth=8, width=4))
    assert prove_executors(replace(digits_mlp(), fixed=fixed), "graph", "eager", num_steps=1).is_bitwise


def test_the_tolerance_of_a_pair_is_the_wider() -> None:
    assert tolerance_of("graph", "tape") == 0
    assert tolerance_of("graph", "reference") == tolerance_of("reference", "graph") == 2e-5
    assert tolerance_of("somewhere:made", "eager") == 0


def test_several_ranks_and_unknown_executors_are_refused() -> None:
    with pytest.raises(UsageError, match="compared on one rank"):
        against_eager("graph", replace(tiny(), mutable=replace(tiny().mutable, plan=parse_plan("data=2"))))
    with pytest.raises(RecipeError, match="did you mean 'graph'"):
        against_eager("grph")
