"""What every executor must do, as check functions: each raises AssertionError on an executor that does not.

The checks run over every executor in test_executor_contract.py, and over broken ones that each must be caught.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.graph.cases import CASES, Case
from weft.graph import AbstractExecutor, Loss, Outputs, State
from weft.specs import Batch

__all__ = [
    "CHECKS",
    "Check",
    "Subject",
    "check_arrival",
    "check_bad_tensors",
    "check_inference_at",
    "clone",
    "take",
    "updated",
]

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Subject:
    """An executor under test. It must agree with plain autograd in `dtype` to `tolerance`; 0 means to the bit. One that
    compiles takes its time for each new graph; one that computes a step in one call has all gradients at its end."""

    name: str
    factory: Callable[[nn.Module, Loss], AbstractExecutor]
    dtype: torch.dtype = torch.float32
    tolerance: float = 0.0
    compiles: bool = False
    is_one_call: bool = False

    def build(self, case: Case) -> AbstractExecutor:
        return self.factory(case.build(), case.loss)


Check = Callable[[Subject, Case], None]


def check_once_each(subject: Subject, case: Case) -> None:
    """The sink is called once for each parameter that requires a gradient, with None for one the loss ignores."""
    executor, calls = subject.build(case), []
    executor(executor.initial_state(), case.batch(), lambda name, gradient: calls.append((name, gradient)))
    assert sorted(name for name, _ in calls) == sorted(case.trainable)
    assert {name for name, gradient in calls if gradient is None} == case.unused


def check_gradients(subject: Subject, case: Case) -> None:
    """Loss, predictions and gradients are those of plain autograd, and the buffers are left as it leaves them."""
    executor = subject.build(case)
    start = executor.initial_state()
    expected = plain_step(case, subject.dtype, start.random)
    outputs, gradients, state = take(executor, start, case.batch())
    assert_near(subject, outputs.loss, expected.outputs.loss)
    assert_near(subject, outputs.predictions, expected.outputs.predictions)
    assert_near(subject, gradients, expected.gradients)
    assert_near(subject, state.buffers, expected.buffers)


def check_second_step(subject: Subject, case: Case) -> None:
    """The returned state, once updated, is where the next step begins."""
    executor = subject.build(case)
    _, gradients, state = take(executor, executor.initial_state(), case.batch())
    before = clone(gradients)
    state = updated(state, gradients)
    expected = plain_step(case, subject.dtype, state.random, state.parameters, state.buffers, seed=1)
    _, next_gradients, state = take(executor, state, case.batch(1))
    assert_near(subject, next_gradients, expected.gradients)
    assert_near(subject, state.buffers, expected.buffers)
    assert_same(gradients, before)  # the first step's gradients belong to the sink: they have not changed


def check_sink_owns(subject: Subject, case: Case) -> None:
    """A sink may write into its gradient at once: no other gradient, now or later, is touched by it."""
    executor, undisturbed = subject.build(case), subject.build(case)
    _, expected, _ = take(undisturbed, undisturbed.initial_state(), case.batch())
    found: Gradients = {}

    def spoil(name: str, gradient: Tensor | None) -> None:
        found[name] = clone(gradient)
        if gradient is not None:
            gradient.fill_(1e9)

    for _ in range(2):
        executor(executor.initial_state(), case.batch(), spoil)
        assert_same(found, expected)


def check_foreign_state(subject: Subject, case: Case) -> None:
    """A state made elsewhere, of copied tensors, gives the bits of the executor's own."""
    own, other = subject.build(case), subject.build(case)
    _, gradients, state = take(own, own.initial_state(), case.batch())
    state = updated(state, gradients)
    foreign = State(clone(dict(state.parameters)), clone(dict(state.buffers)), state.random.clone())
    assert_same(take(other, foreign, case.batch(1)), take(own, state, case.batch(1)))


def check_randomness(subject: Subject, case: Case) -> None:
    """All that is random comes from the state, and moves it on; the global generator is left alone."""
    executor = subject.build(case)
    before = torch.get_rng_state()

    def at(seed: int) -> tuple[Outputs, Gradients, State]:
        random = torch.Generator().manual_seed(seed).get_state()
        return take(executor, replace(executor.initial_state(), random=random), case.batch())

    first, again, other = (clone(at(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first[:2], again[:2])
    assert_same(first[2].random, again[2].random)
    is_random = case.name == "dropout"
    assert torch.equal(first[0].predictions, other[0].predictions) != is_random
    assert torch.equal(first[2].random, torch.Generator().manual_seed(1).get_state()) != is_random


def check_inference(subject: Subject, case: Case) -> None:
    """Inference is evaluation mode: it changes nothing, draws nothing, needs no gradient and repeats itself."""
    executor = subject.build(case)
    _, _, state = take(executor, executor.initial_state(), case.batch())
    check_inference_at(subject, case, executor, state)


def check_inference_at(subject: Subject, case: Case, executor: AbstractExecutor, state: State) -> None:
    """The same from a given state, for an executor that cannot train."""
    before, random = clone(state), torch.get_rng_state()
    first, again = executor.infer(state, case.batch(1)), executor.infer(state, case.batch(1))
    assert_same(state, before)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(first, again)
    expected = plain_inference(case, subject.dtype, state)
    assert_near(subject, first.predictions, expected.predictions)
    assert_near(subject, first.loss, expected.loss)
    assert not first.loss.requires_grad and not first.predictions.requires_grad


def check_detached(subject: Subject, case: Case) -> None:
    """Neither outputs nor gradients hold on to the autograd graph."""
    executor = subject.build(case)
    outputs, gradients, _ = take(executor, executor.initial_state(), case.batch())
    assert outputs.loss.ndim == 0
    for tensor in (outputs.loss, outputs.predictions, *gradients.values()):
        assert tensor is None or (tensor.grad_fn is None and not tensor.requires_grad)


def check_recovery(subject: Subject, case: Case) -> None:
    """After a sink or a forward that raised, the next step is as if nothing had happened."""
    executor, fresh = subject.build(case), subject.build(case)
    start = clone(executor.initial_state())
    expected = take(fresh, clone(start), case.batch())

    def refuse(_name: str, _gradient: Tensor | None) -> None:
        raise LookupError("refused")

    wrong = Batch(tuple(torch.zeros(6, 1, 1, 1, 1) for _ in case.inputs), case.batch().targets)
    for batch, error in ((case.batch(), LookupError), (wrong, RuntimeError)):
        random = torch.get_rng_state()
        assert_raises(error, partial(executor, clone(start), batch, refuse))
        assert torch.equal(torch.get_rng_state(), random)
        assert_same(take(executor, clone(start), case.batch()), expected)


def check_bad_tensors(subject: Subject, case: Case) -> None:
    """The first tensor that is not finite is named; looking for it changes nothing."""
    executor = subject.build(case)
    state, batch = clone(executor.initial_state()), case.batch()
    before = clone(state)
    assert executor.first_bad_tensor(state, batch) is None
    assert_same(executor.initial_state().buffers, before.buffers)
    assert executor.first_bad_tensor(state, spoiled(batch, "inputs")) == "input 0"
    assert executor.first_bad_tensor(state, spoiled(batch, "targets")) == "target 0"
    for kind, tensors in (("parameter", state.parameters), ("buffer", state.buffers)):
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and name not in case.unused:
                bad = {**tensors, name: torch.full_like(tensor, torch.inf)}
                planted = replace(clone(before), **{f"{kind}s": bad})
                assert executor.first_bad_tensor(planted, batch) == f"{kind} {name}"
    assert executor.first_bad_tensor(before, batch) is None


CHECKS: tuple[Check, ...] = (
    check_once_each,
    check_gradients,
    check_second_step,
    check_sink_owns,
    check_foreign_state,
    check_randomness,
    check_inference,
    check_detached,
    check_recovery,
    check_bad_tensors,
)


def check_arrival(subject: Subject) -> None:
    """A gradient reaches the sink as soon as it is complete, while the backward of earlier layers still has to run.

    forward    first -> probe -> last
    backward   last  -> probe -> first
    sink           ^ last           ^ first
    """
    module = nn.Sequential(nn.Linear(4, 4), Probe(), nn.Linear(4, 3))
    executor = subject.factory(module, nn.functional.mse_loss)
    state, log = executor.initial_state(), PASSED
    log.clear()
    executor(state, CASES[0].batch(), lambda name, _: log.append(name))
    assert set(log[:2]) == {"2.weight", "2.bias"}
    assert log[2] == "probe"
    assert set(log[3:]) == {"0.weight", "0.bias"}


PASSED: list[str] = []
"""Where the probe writes when backward passes it."""


class Probe(nn.Module):
    """Hands its input on, and writes into the log when backward passes: by operators, so that graphs have them too."""

    def forward(self, x: Tensor) -> Tensor:
        return probe_forward(x)  # type: ignore[no-any-return]


@torch.library.custom_op("weft_tests::probe", mutates_args=())
def probe_forward(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("weft_tests::probe_backward", mutates_args=())
def probe_backward(gradient: Tensor) -> Tensor:
    PASSED.append("probe")
    return gradient.clone()


probe_forward.register_fake(torch.empty_like)
probe_backward.register_fake(torch.empty_like)
probe_forward.register_autograd(lambda ctx, gradient: probe_backward(gradient))


@dataclass(frozen=True)
class PlainStep:
    outputs: Outputs
    gradients: Gradients
    buffers: Mapping[str, Tensor]


def plain_step(
    case: Case,
    dtype: torch.dtype,
    random: Tensor,
    parameters: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> PlainStep:
    """The same step as a PyTorch user would write it, on a module of its own."""
    module = plain_module(case, dtype, {**(parameters or {}), **(buffers or {})}).train()
    batch = case.batch(seed).to(dtype=dtype)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random)
        predictions = module(*batch.inputs)
        loss = case.loss(predictions, *batch.targets)
    gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
    outputs = Outputs(loss.detach(), predictions.detach())
    return PlainStep(outputs, dict(zip(trainable, gradients, strict=True)), dict(module.named_buffers()))


@torch.no_grad()
def plain_inference(case: Case, dtype: torch.dtype, state: State) -> Outputs:
    module = plain_module(case, dtype, {**state.parameters, **state.buffers}).eval()
    batch = case.batch(1).to(dtype=dtype)
    predictions = module(*batch.inputs)
    return Outputs(case.loss(predictions, *batch.targets), predictions)


@torch.no_grad()
def plain_module(case: Case, dtype: torch.dtype, values: Mapping[str, Tensor]) -> nn.Module:
    module = case.build().to(dtype)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.copy_(values.get(name, tensor))
    return module


def take(executor: AbstractExecutor, state: State, batch: Batch) -> tuple[Outputs, Gradients, State]:
    """One step, with its gradients by name."""
    gradients: Gradients = {}
    outputs, after = executor(state, batch, gradients.__setitem__)
    return outputs, gradients, after


@torch.no_grad()
def updated(state: State, gradients: Gradients, lr: float = 0.1) -> State:
    """Plain gradient descent, in place, as an optimizer of level 2 does it."""
    for name, gradient in gradients.items():
        if gradient is not None:
            state.parameters[name].sub_(gradient, alpha=lr)
    return state


def spoiled(batch: Batch, part: str) -> Batch:
    first, *rest = getattr(batch, part)
    return replace(batch, **{part: (torch.full_like(first, torch.nan), *rest)})


def clone(value: Any) -> Any:
    """A deep copy whose tensors are plain and detached."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, State | Outputs):
        return type(value)(*(clone(item) for item in vars(value).values()))
    if isinstance(value, tuple):
        return tuple(map(clone, value))
    return {name: clone(item) for name, item in value.items()} if isinstance(value, Mapping) else copy.copy(value)


def assert_near(subject: Subject, found: Any, expected: Any) -> None:
    """Equal to the subject's tolerance, in structure, type and value."""
    compare(found, expected, subject.tolerance)


def assert_same(found: Any, expected: Any) -> None:
    """Equal to the bit."""
    compare(found, expected, 0.0)


def compare(found: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, Tensor):
        assert found is not None
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=tolerance, atol=tolerance)
    elif isinstance(expected, State | Outputs):
        compare(vars(found), vars(expected), tolerance)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for name, item in expected.items():
            compare(found[name], item, tolerance)
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            compare(*pair, tolerance)
    else:
        assert found is None and expected is None


def assert_raises(error: type[BaseException], call: Callable[[], object]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")
