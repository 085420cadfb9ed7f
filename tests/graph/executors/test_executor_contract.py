"""The contract over every executor, and over broken ones that it must catch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.graph.cases import CASES, Case
from tests.graph.contract import CHECKS, Check, Subject, check_arrival, take
from weft.graph import AbstractExecutor, EagerExecutor, GradientSink, Loss, Outputs, ReferenceExecutor, State
from weft.specs import Batch
from weft.training.build import EXECUTORS as CATALOGUE

EXECUTORS = (
    Subject("eager", CATALOGUE["eager"]),
    Subject("graph", CATALOGUE["graph"]),
    Subject("inductor", CATALOGUE["inductor"], tolerance=1e-5),
    Subject("tape", CATALOGUE["tape"]),
    Subject("reference", CATALOGUE["reference"], dtype=torch.float64),
    Subject("inductor", CATALOGUE["inductor"], tolerance=1e-5, compiles=True),
    Subject("jax", CATALOGUE["jax"], tolerance=1e-5, compiles=True, is_one_call=True),
)
FOR_INFERENCE = {"onnxruntime"}  # has a contract of its own: tests/graph/onnx/test_runtime.py

# Compilers take a while: they get every check on the cases that are hardest to get right, and one on the others.
HARDEST = ("convolution", "dropout")
PAIRS = [
    pytest.param(s, case, check, id=f"{check.__name__.removeprefix('check_')}-{case.name}-{s.name}")
    for s in EXECUTORS
    for case in CASES
    for check in CHECKS
    if not s.compiles or case.name in HARDEST or check.__name__ == "check_gradients"
]

over_executors = pytest.mark.parametrize("subject", EXECUTORS, ids=lambda subject: subject.name)
over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_executor_is_under_contract() -> None:
    assert {subject.name for subject in EXECUTORS} == CATALOGUE.keys() - FOR_INFERENCE


@pytest.mark.parametrize(("subject", "case", "check"), PAIRS)
@pytest.mark.usefixtures("xla_cache")
def test_executor_keeps_the_contract(subject: Subject, case: Case, check: Check) -> None:
    check(subject, case)


@pytest.mark.parametrize("subject", [s for s in EXECUTORS if not s.is_one_call], ids=lambda subject: subject.name)
def test_gradients_arrive_during_backward(subject: Subject) -> None:
    check_arrival(subject)


@pytest.mark.usefixtures("xla_cache")
@over_executors
@over_cases
def test_executor_agrees_with_the_reference(subject: Subject, case: Case) -> None:
    exact, executor = ReferenceExecutor(case.build(), case.loss), subject.build(case)
    state = executor.initial_state()
    expected = take(exact, state, case.batch())  # the reference takes a state of any floating-point type
    found = take(executor, state, case.batch())
    for name, gradient in found[1].items():
        if gradient is not None:
            torch.testing.assert_close(gradient.double(), expected[1][name], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[0].loss.double(), expected[0].loss, rtol=1e-6, atol=1e-6)


Step = Callable[[AbstractExecutor, State, Batch, GradientSink], tuple[Outputs, State]]
Infer = Callable[[AbstractExecutor, State, Batch], Outputs]


class Altered(AbstractExecutor):
    """The eager executor with one part replaced."""

    def __init__(self, module: nn.Module, loss: Loss, step: Step | None, infer: Infer | None, blind: bool) -> None:
        self._inner = EagerExecutor(module, loss)
        self._step, self._infer, self._blind = step, infer, blind

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        if self._step is None:
            return self._inner(state, batch, on_gradient)
        return self._step(self._inner, state, batch, on_gradient)

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(state, batch) if self._infer is None else self._infer(self._inner, state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return None if self._blind else self._inner.first_bad_tensor(state, batch)


def broken(name: str, step: Step | None = None, infer: Infer | None = None, blind: bool = False) -> Subject:
    return Subject(name, lambda module, loss: Altered(module, loss, step, infer, blind))


def sink_twice(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    def twice(name: str, gradient: Tensor | None) -> None:
        sink(name, gradient)
        sink(name, gradient)

    return inner(state, batch, twice)


def sink_after_backward(
    inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink
) -> tuple[Outputs, State]:
    outputs, gradients, after = take(inner, state, batch)
    for name, gradient in gradients.items():
        sink(name, gradient)
    return outputs, after


def keeps_gradients() -> Step:
    kept: list[Tensor] = []

    def step(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
        while kept:
            kept.pop().zero_()

        def keep(name: str, gradient: Tensor | None) -> None:
            kept.extend([] if gradient is None else [gradient])
            sink(name, gradient)

        return inner(state, batch, keep)

    return step


def shares_memory(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    memory = torch.zeros(1000)

    def share(name: str, gradient: Tensor | None) -> None:
        sink(name, None if gradient is None else memory[: gradient.numel()].view_as(gradient).copy_(gradient))

    return inner(state, batch, share)


def one_memory_for_two(
    inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink
) -> tuple[Outputs, State]:
    outputs, gradients, after = take(inner, state, batch)
    tall = gradients["tall"]
    assert tall is not None
    for name, gradient in {**gradients, "wide": tall.view(2, 9)}.items():
        sink(name, gradient)
    return outputs, after


def forgets_unused(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    return inner(state, batch, lambda name, gradient: None if gradient is None else sink(name, gradient))


def forward_twice(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    inner(state, batch, lambda *_: None)
    return inner(state, batch, sink)


def global_random(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    outputs, after = inner(replace(state, random=torch.get_rng_state()), batch, sink)
    torch.set_rng_state(after.random)
    return outputs, after


def frozen_random(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    outputs, after = inner(state, batch, sink)
    return outputs, replace(after, random=state.random)


def own_state_only(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    return inner(replace(inner.initial_state(), random=state.random), batch, sink)


def attached(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
    outputs, after = inner(state, batch, sink)
    return replace(outputs, predictions=outputs.predictions.requires_grad_()), after


def sticks() -> Step:
    busy = False

    def step(inner: AbstractExecutor, state: State, batch: Batch, sink: GradientSink) -> tuple[Outputs, State]:
        nonlocal busy
        assert not busy
        busy = True
        result = inner(state, batch, sink)
        busy = False
        return result

    return step


def infers_in_training_mode(inner: AbstractExecutor, state: State, batch: Batch) -> Outputs:
    return inner(state, batch, lambda *_: None)[0]


BROKEN: tuple[tuple[Subject, str, str], ...] = (
    (broken("sink twice", sink_twice), "check_once_each", "mlp"),
    (broken("forgets unused", forgets_unused), "check_once_each", "unused"),
    (broken("forward twice", forward_twice), "check_gradients", "convolution"),
    (broken("keeps gradients", keeps_gradients()), "check_second_step", "mlp"),
    (broken("shares memory", shares_memory), "check_second_step", "mlp"),
    (broken("one memory for two", one_memory_for_two), "check_sink_owns", "viewed"),
    (broken("uses its own state only", own_state_only), "check_foreign_state", "mlp"),
    (broken("global random", global_random), "check_randomness", "dropout"),
    (broken("frozen random", frozen_random), "check_randomness", "dropout"),
    (broken("infers in training mode", infer=infers_in_training_mode), "check_inference", "convolution"),
    (broken("infers in training mode", infer=infers_in_training_mode), "check_inference", "dropout"),
    (broken("attached outputs", attached), "check_detached", "mlp"),
    (broken("sticks after an error", sticks()), "check_recovery", "mlp"),
    (broken("sees nothing bad", blind=True), "check_bad_tensors", "mlp"),
)


@pytest.mark.parametrize(("subject", "check", "case"), BROKEN, ids=lambda value: getattr(value, "name", value))
def test_broken_executor_is_caught(subject: Subject, check: str, case: str) -> None:
    found = {c.__name__: c for c in CHECKS}[check]
    with pytest.raises(AssertionError):
        found(subject, {c.name: c for c in CASES}[case])


def test_sink_called_after_backward_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_arrival(broken("late", sink_after_backward))


def test_every_check_has_been_seen_to_fail() -> None:
    assert {check for _, check, _ in BROKEN} == {check.__name__ for check in CHECKS}
