"""Comparisons of traces, on tensors made by hand."""

from dataclasses import replace

import pytest
import torch

from weft.distributed.script.observation.tracing import Facts
from weft.proving.script_trace import ScriptTrace, compare_script


def trace_of(*weights: float, gradient: float = 1.0, small: float = 1e-6) -> ScriptTrace:
    """A parameter of two elements, the second of which has a gradient that is nothing but rounding."""
    steps = [{"w": torch.tensor([weight, 1.0 - weight])} for weight in weights]
    for step in steps[1:]:
        step["gradient w"] = torch.tensor([gradient, small])
    return ScriptTrace(steps, {}, Facts())


def test_equal_bits_are_told_as_such() -> None:
    one = trace_of(0.5, 0.75)
    proof = compare_script([one, one], one, 1e-4)
    assert proof.passed and proof.is_bitwise and proof.num_steps == 1 and "to the last bit" in proof.finding


def test_rounding_passes_and_is_no_equality() -> None:
    proof = compare_script([trace_of(0.5, 0.75 + 1e-6)], trace_of(0.5, 0.75), 1e-4)
    assert proof.passed and not proof.is_bitwise and 0 < proof.largest_error < 1e-5


def test_the_first_parameter_and_step_that_differ_are_named() -> None:
    proof = compare_script([trace_of(0.5, 0.75, 0.8)], trace_of(0.5, 0.75, 0.9), 1e-4)
    assert not proof.passed and proof.finding.startswith("after step 2, w[0] of the ranks is off by 0.111")
    assert "allowed: 0.0001" in proof.finding


def test_what_adam_makes_of_a_gradient_that_is_rounding_does_not_count() -> None:
    found = trace_of(0.5, 0.75)
    found.steps[1]["w"][1] += 0.01
    assert compare_script([found], trace_of(0.5, 0.75), 1e-4).passed
    assert not compare_script([found], trace_of(0.5, 0.75, small=0.5), 1e-4).passed


def test_a_wrong_scale_shows_in_gradients_where_steps_are_short() -> None:
    found, expected = trace_of(0.5, 0.5 + 1e-7, gradient=0.5), trace_of(0.5, 0.5 + 2e-7)
    proof = compare_script([found], expected, 1e-4)
    assert not proof.passed and "gradient w[0]" in proof.finding
    assert compare_script([found], expected, 1e-4, has_gradients=False).passed


def test_ranks_must_have_the_same_bits() -> None:
    one, other = trace_of(0.5, 0.75), trace_of(0.5, 0.75 + 1e-6)
    proof = compare_script([one, other], one, 1e-4)
    assert not proof.passed and proof.finding.startswith("ranks differ after step 1: w[0] of rank 1 is off")


def test_another_number_of_steps_is_a_difference() -> None:
    proof = compare_script([trace_of(0.5)], trace_of(0.5, 0.75), 1e-4)
    assert not proof.passed and "rank 0: 0, one process: 1" in proof.finding


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_prove_nothing(value: float) -> None:
    broken = replace(trace_of(0.5, value))
    assert not compare_script([broken], broken, 1e-4).passed
