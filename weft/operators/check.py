"""The checks of an operator: each compares what it gives with what it should, and says where they differ.

forward      against the reference in float64, or the operator itself in float64 where there is none
gradient     of every output by every input, and of all outputs at once, against finite differences
layout       inputs and gradients that are not contiguous, against contiguous ones
empty        sizes of 0
broadcast    inputs stretched over others, forward and gradient
aliasing     two calls share no memory, and inputs stay as they are
opcheck      torch's own: schema, registration, shapes without data, tracing
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.operators.comparison import Comparison, compare_tensors, rounding_tolerance
from weft.operators.evaluation import Outputs, Truth, call, call_with_gradients, find_truth, make_weights
from weft.operators.finite_differences import derivatives, difference_tolerance
from weft.operators.input_variants import Variant, as_layout, broadcast_variants, empty_variants, layout_variants
from weft.operators.operator import Operator

__all__ = ["CHECKS", "Finding", "check_operator"]


@dataclass(frozen=True)
class Finding:
    """One comparison, or one fault."""

    operator: str
    sample: int
    check: str
    subject: str
    passed: bool
    error: float = 0.0
    tolerance: float = 0.0
    note: str = ""  # where the worst element is, or what went wrong


@dataclass(frozen=True)
class _Result:
    """A finding before it knows what it belongs to."""

    subject: str
    passed: bool
    error: float = 0.0
    tolerance: float = 0.0
    note: str = ""


def check_operator(operator: Operator, *, seed: int = 0) -> list[Finding]:
    """Run every check on every sample.

    Args:
        seed: of the samples.

    Returns:
        A finding for each comparison. A check that raises is one that did not pass; its note is what was raised.
    """
    findings = []
    for sample, inputs in enumerate(operator.samples(seed=seed)):
        for name, check in CHECKS.items():
            findings += [
                Finding(operator.name, sample, name, r.subject, r.passed, r.error, r.tolerance, r.note)
                for r in _guarded(check, operator, inputs)
            ]
    return findings


def _guarded(check: "Check", operator: Operator, inputs: tuple[Any, ...]) -> list[_Result]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd shapes make torch warn; what matters is the result
            return list(check(operator, inputs))
    except Exception as error:
        return [_Result("call", False, note=f"{type(error).__name__}: {_first_line(error)}")]


def check_forward(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    truth, _ = find_truth(operator, inputs)
    if truth is None:
        yield _Result("outputs", True, note="not compared: no reference, and the operator does not run in float64")
        return
    yield from _compare_outputs(call(operator, inputs), truth.outputs(inputs), f"against {truth.label}")


def check_gradient(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    if not operator.is_differentiable:
        yield _Result("inputs", True, note="not compared: no backward")
        return
    yield from _compare_gradients(operator, inputs, find_truth(operator, inputs)[1])


def check_layout(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    """Each layout of each input, and gradients that come in as `sum().backward()` gives them."""
    for variant in layout_variants(inputs):
        plain = tuple(v.contiguous() if isinstance(v, Tensor) else v for v in variant.inputs)
        yield from _compare_calls(operator, variant.inputs, plain, _same_weights, variant.label)
    for layout in ("transposed", "expanded"):
        label = f"gradient {layout}"
        if operator.is_differentiable:
            yield from _compare_calls(operator, inputs, inputs, _in_layout(layout), label)


def check_empty(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    yield from _check_shapes(operator, inputs, empty_variants(inputs))


def check_broadcast(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    yield from _check_shapes(operator, inputs, broadcast_variants(inputs))


def check_aliasing(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    """Keep what one call gave, call again with other values, and look at it again."""
    before = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    other = [value * 2 + 1 if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs]
    first = _everything(operator, inputs)
    kept = {name: value.clone() for name, value in first.items()}
    second = _everything(operator, other)
    for name, value in first.items():
        unchanged = compare_tensors(value, kept[name], 0.0)
        yield _result(f"{name} after another call", unchanged)
        shared = [key for key, later in second.items() if _shares_memory(value, later)]
        yield _Result(f"{name} of two calls", not shared, note=f"shares memory with {', '.join(shared)}" * bool(shared))
    for i, (value, original) in enumerate(zip(inputs, before, strict=True)):
        if isinstance(value, Tensor):
            yield _result(f"input {i} after a call", compare_tensors(value, original, 0.0))


def check_with_torch(operator: Operator, inputs: Sequence[Any]) -> Iterator[_Result]:
    values = tuple(
        value.detach().clone().requires_grad_(operator.is_differentiable)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in inputs
    )
    results = torch.library.opcheck(operator.overload, values, raise_exception=False)
    for name, outcome in results.items():
        passed = outcome == "SUCCESS"
        yield _Result(name, passed, note="" if passed else _first_line(outcome))


Check = Callable[[Operator, tuple[Any, ...]], Iterable[_Result]]

CHECKS: dict[str, Check] = {
    "forward": check_forward,
    "gradient": check_gradient,
    "layout": check_layout,
    "empty": check_empty,
    "broadcast": check_broadcast,
    "aliasing": check_aliasing,
    "opcheck": check_with_torch,
}


def _compare_outputs(outputs: Outputs, expected: Outputs, label: str) -> Iterator[_Result]:
    if len(outputs) != len(expected):
        yield _Result("outputs", False, note=f"{len(outputs)} outputs instead of {len(expected)}")
        return
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        tolerance = rounding_tolerance(output.dtype)
        yield _result(f"output {i} {label}", compare_tensors(output, wanted, tolerance))


def _compare_gradients(operator: Operator, inputs: Sequence[Any], truth: Truth) -> Iterator[_Result]:
    """Each output on its own, so that a wrong gradient has a name; then all together."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weights = make_weights(call(operator, inputs), generator)
    prepared = truth.prepare(inputs)
    with torch.no_grad():
        numeric = derivatives(truth.function, prepared, weights, generator=generator)
    alone = [
        call_with_gradients(operator, inputs, [w if k == i else None for k, w in enumerate(weights)])[1]
        if weight is not None
        else {}
        for i, weight in enumerate(weights)
    ]
    names = operator.argument_names
    for slope in numeric:
        original = inputs[slope.input]
        found = alone[slope.output][slope.input]
        expected = found.double().flatten().index_put((slope.elements,), slope.values).reshape(original.shape)
        tolerance = max(rounding_tolerance(original.dtype), difference_tolerance(prepared[slope.input].dtype))
        subject = f"output {slope.output} by {names[slope.input]}"
        yield _result(subject, compare_tensors(found, expected, tolerance))
    if sum(weight is not None for weight in weights) > 1:
        together = call_with_gradients(operator, inputs, weights)[1]
        for i, gradient in together.items():
            total = sum((part[i].double() for part in alone if part), torch.zeros(inputs[i].shape, dtype=torch.float64))
            subject = f"all outputs by {names[i]}"
            yield _result(subject, compare_tensors(gradient, total, rounding_tolerance(gradient.dtype)))


def _check_shapes(operator: Operator, inputs: Sequence[Any], variants: Iterable[Variant]) -> Iterator[_Result]:
    """Shapes that the truth accepts must be right or refused. One that the truth refuses is not tried in C++."""
    truth = find_truth(operator, inputs)[0]
    if truth is None or (truth.label != "reference" and not operator.definition.is_safe):
        yield _Result("shapes", True, note="not tried: no reference to say which shapes make sense")
        return
    for variant in variants:
        try:
            expected = truth.outputs(variant.inputs)
        except Exception:
            continue
        try:
            outputs = call(operator, variant.inputs)
        except Exception as error:
            yield _Result(variant.label, True, note=f"refused: {_first_line(error)}")
            continue
        results = list(_compare_outputs(outputs, expected, f"with {variant.label}"))
        yield from results
        if operator.is_differentiable and all(result.passed for result in results):
            yield from _gradients_of_variant(operator, variant)


def _gradients_of_variant(operator: Operator, variant: Variant) -> Iterator[_Result]:
    truth = find_truth(operator, variant.inputs)[1]
    try:
        results = list(_compare_gradients(operator, variant.inputs, truth))
    except Exception as error:
        results = [_Result("gradient", False, note=f"{type(error).__name__}: {_first_line(error)}")]
    for r in results:
        yield _Result(f"{r.subject} with {variant.label}", r.passed, r.error, r.tolerance, r.note)


def _compare_calls(
    operator: Operator, inputs: Sequence[Any], plain: Sequence[Any], change: "ChangeWeights", label: str
) -> Iterator[_Result]:
    """Outputs and gradients of the same values in two layouts."""
    with torch.no_grad():
        outputs, expected = call(operator, inputs), call(operator, plain)
    yield from _compare_outputs(outputs, expected, f"with {label}")
    if not operator.is_differentiable:
        return
    weights = change(make_weights(expected, torch.Generator().manual_seed(0)))
    straight = [None if weight is None else weight.contiguous() for weight in weights]
    gradients = call_with_gradients(operator, inputs, weights)[1]
    for i, wanted in call_with_gradients(operator, plain, straight)[1].items():
        subject = f"gradient by {operator.argument_names[i]} with {label}"
        yield _result(subject, compare_tensors(gradients[i], wanted, rounding_tolerance(wanted.dtype)))


ChangeWeights = Callable[[list[Tensor | None]], list[Tensor | None]]


def _same_weights(weights: list[Tensor | None]) -> list[Tensor | None]:
    return weights


def _in_layout(layout: str) -> ChangeWeights:
    def change(weights: list[Tensor | None]) -> list[Tensor | None]:
        moved = [None if weight is None else as_layout(weight, layout) for weight in weights]
        return [weight if new is None else new for weight, new in zip(weights, moved, strict=True)]

    return change


def _everything(operator: Operator, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """All tensors that a call gives: outputs, and gradients where there are some."""
    if not operator.is_differentiable:
        return {f"output {i}": output for i, output in enumerate(call(operator, inputs))}
    with torch.no_grad():
        weights = make_weights(call(operator, inputs), torch.Generator().manual_seed(0))
    outputs, gradients = call_with_gradients(operator, inputs, weights)
    names = operator.argument_names
    return {
        **{f"output {i}": output for i, output in enumerate(outputs)},
        **{f"gradient by {names[i]}": gradient for i, gradient in gradients.items()},
    }


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _result(subject: str, comparison: Comparison) -> _Result:
    return _Result(subject, comparison.passed, comparison.error, comparison.tolerance, comparison.where)


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
