"""The checks of an operator: right ones pass, and each planted fault is caught by the check that should."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.operators import cpp_operator, operator
from weft.operators.check import CHECKS, Finding, check_operator


class Affine:
    """x * w + b, and x + w: two outputs, three inputs that may be broadcast."""

    def forward(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * w * scale + b, x + w

    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        (first, second), (x, w, b, scale) = grads, inputs
        by_x = (first * w * scale).sum_to_size(x.shape) + second.sum_to_size(x.shape)
        by_w = (first * x * scale).sum_to_size(w.shape) + second.sum_to_size(w.shape)
        return by_x, by_w, first.sum_to_size(b.shape), None

    def reference(self, x: Tensor, w: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.addcmul(b.expand(torch.broadcast_shapes(x.shape, w.shape, b.shape)), x, w, value=scale), x + w

    def samples(self) -> list[Any]:
        return [(torch.randn(3, 4), torch.randn(3, 4), torch.randn(4), 1.5)]


class WrongSecondGradient(Affine):
    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        by_x, by_w, by_b, _ = super().backward(grads, inputs, outputs)
        return by_x, by_w + 0.01 * grads[1].sum_to_size(by_w.shape), by_b, None


class IgnoredBroadcastAxis(Affine):
    """The gradient of b is that of the first row, as if b had not been used by the others."""

    def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
        by_x, by_w, by_b, _ = super().backward(grads, inputs, outputs)
        b = inputs[2]
        return by_x, by_w, grads[0][0] if b.shape == grads[0].shape[1:] and len(grads[0]) else by_b, None


class WrongElement(Affine):
    def forward(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        first, second = super().forward(x, w, b, scale)
        if first.dim() == 2 and first.shape[0] > 2:
            first[2, 1] += 1e-3
        return first, second


class ReusedOutput(Affine):
    """Keeps its first output, and gives it again: Deep500's operators did, so that two calls in one graph were one."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        first, second = super().forward(x, w, b, scale)
        if type(first) is not Tensor:  # shapes without data
            return first, second
        kept = self.kept.setdefault((first.shape, first.dtype), torch.empty_like(first))
        kept.copy_(first)
        return kept, second


class ChangedInput(Affine):
    def forward(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        results = super().forward(x, w, b, scale)
        x.mul_(2)
        return results


class WrongShape(Affine):
    def infer(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x.new_empty(1), x + w


class WrongWhenEmpty(Affine):
    def forward(self, x: Tensor, w: Tensor, b: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        first, second = super().forward(x, w, b, scale)
        return (first, second) if first.numel() else (first.new_zeros(1), second)


def faults_of(subject: type, name: str) -> list[Finding]:
    return [finding for finding in check_operator(operator(subject, name=f"planted::{name}")) if not finding.passed]


# A right operator of two outputs failed the check of Deep500.
def test_a_right_operator_of_two_outputs_passes_every_check() -> None:
    findings = check_operator(operator(Affine, name="planted::right"))
    assert [finding for finding in findings if not finding.passed] == []
    assert {finding.check for finding in findings} == set(CHECKS)
    gradients = {finding.subject for finding in findings if finding.check == "gradient"}
    pairs = {f"output {i} by {name}" for i in (0, 1) for name in ("x", "w", "b")}
    assert gradients == pairs | {f"all outputs by {name}" for name in ("x", "w", "b")}


@pytest.mark.parametrize(
    ("subject", "check", "where"),
    [
        (WrongSecondGradient, "gradient", "output 1 by w"),
        (IgnoredBroadcastAxis, "gradient", "output 0 by b"),
        (WrongElement, "forward", "output 0 against reference"),
        (ReusedOutput, "aliasing", "output 0 after another call"),
        (ChangedInput, "aliasing", "input 0 after a call"),
        (WrongShape, "opcheck", "test_faketensor"),
        (WrongWhenEmpty, "empty", "output 0 with size 3 set to 0"),
    ],
)
def test_a_planted_fault_is_caught_by_its_check(subject: type, check: str, where: str) -> None:
    faults = faults_of(subject, subject.__name__.lower())
    assert (check, where) in {(fault.check, fault.subject) for fault in faults}
    assert all(fault.note for fault in faults)


def test_the_wrong_element_is_named() -> None:
    fault = next(f for f in faults_of(WrongElement, "element") if f.check == "forward")
    assert fault.note.startswith("at [2, 1]:") and fault.note.endswith("1 of 12 elements differ")


def test_only_the_faulty_gradient_fails() -> None:
    faults = [fault for fault in faults_of(WrongSecondGradient, "second") if fault.check == "gradient"]
    assert {fault.subject for fault in faults} == {"output 1 by w"}


# Deep500's check of x^2 in float32 reported an error of 600 at x = 300.
@pytest.mark.parametrize("runs_in_float64", [True, False])
def test_an_exact_gradient_in_float32_passes(runs_in_float64: bool) -> None:
    class Square:
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64 and not runs_in_float64:
                raise TypeError("only float32")
            return x * x

        def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
            return 2 * inputs[0] * grads[0]

        def samples(self) -> list[Any]:
            return [torch.tensor([1.5, 20.0, 300.0])]

    findings = check_operator(operator(Square, name=f"planted::square_{runs_in_float64}".lower()))
    assert all(finding.passed for finding in findings)
    gradient = next(finding for finding in findings if finding.check == "gradient")
    assert gradient.error < (1e-6 if runs_in_float64 else 1e-3)


STRIDED = """
#include <weft/operator.h>
const char* forward(const weft::Tensor* in, weft::Tensor* out, const weft::Call* call) {
    return weft::with_floating(in[0].type, [&](auto zero) {
        using T = decltype(zero);
        for (int64_t i = 0; i < in[0].size(); ++i) out[0].as<T>()[i] = 2 * in[0].as<T>()[i];
    });
}
"""


@pytest.mark.parametrize("contiguous", [True, False])
def test_an_input_read_as_contiguous_is_caught(contiguous: bool) -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    subject = cpp_operator(
        STRIDED,
        twice,
        name=f"planted::twice_{contiguous}".lower(),
        backward=False,
        contiguous=contiguous,
        samples=lambda: [(torch.randn(3, 4),)],
        reference=lambda x: 2 * x,
    )
    faults = {finding.subject for finding in check_operator(subject) if not finding.passed}
    assert ("output 0 with input 0 transposed" in faults) is not contiguous
    assert contiguous is (faults == set())


def test_a_call_that_raises_is_a_finding() -> None:
    class Raises(Affine):
        def backward(self, grads: Any, inputs: Any, outputs: Any) -> Any:
            raise ArithmeticError("planted")

    notes = {fault.check: fault.note for fault in faults_of(Raises, "raises")}
    assert notes["gradient"] == "ArithmeticError: planted"


def test_without_reference_and_float64_nothing_is_claimed() -> None:
    class Half:
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype != torch.float32:
                raise TypeError("only float32")
            return x / 2

        def samples(self) -> list[Any]:
            return [torch.randn(3)]

    findings = check_operator(operator(Half, name="planted::half"))
    notes = {finding.check: finding.note for finding in findings if finding.note}
    assert "not compared" in notes["forward"] and "no backward" in notes["gradient"]


def test_an_operator_without_samples_is_refused() -> None:
    class NoSamples:
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(UsageError, match="samples"):
        check_operator(operator(NoSamples, name="planted::no_samples"))
