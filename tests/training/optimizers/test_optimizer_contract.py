"""What every optimizer promises, ours and torch.optim's alike."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.training.component import Component, build
from weft.training.optimizers import (
    OPTIMIZERS,
    AbstractOptimizer,
    Optimizer,
    OptimizerState,
    Scope,
    Shared,
    TorchOptimizer,
    WholeNorms,
)

Make = Callable[[], AbstractOptimizer]

COMPONENTS = [
    *(Component(name) for name in OPTIMIZERS if name != "torch"),
    Component("rmsprop", momentum=0.9, centered=True),
    Component("momentum", dampening=0.2),
    *(
        Component("torch", name=name, lr=0.01)
        for name in (
            *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon"),
            *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
        )
    ),
    Component("torch", name="SGD", lr=0.01, options="momentum=0.9, nesterov=True"),
    Component("torch", name="Adam", options="amsgrad=True"),
]
OPTIMIZER = pytest.mark.parametrize("component", COMPONENTS, ids=str)


def make(component: Component) -> Make:
    return lambda: build(component, OPTIMIZERS, "optimizer")


def parameters() -> dict[str, Tensor]:
    """Of two dimensions each, the only ones that Muon takes."""
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("a", (3, 5)), ("b.c", (4, 2)))}


def gradients(step: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in parameters().items()}


def advance(
    optimizer: AbstractOptimizer, own: Mapping[str, Tensor], state: OptimizerState, first: int, last: int
) -> OptimizerState:
    for step in range(first, last):
        state = optimizer.update(gradients(step), own, state, lr=optimizer.lr / (1 + step))
    return state


def through_a_file(state: OptimizerState) -> OptimizerState:
    """What a checkpoint keeps: tensors by name, and of a parameter without slots not even the name."""
    slots = {name: {slot: tensor.clone() for slot, tensor in own.items()} for name, own in state.slots.items()}
    shared = Shared(lr=state.shared.lr.clone(), step=state.shared.step.clone())
    return OptimizerState(shared, {name: own for name, own in slots.items() if own})


def check_resumes(make: Make) -> None:
    """A new optimizer that continues from a stored state gives the bits of one that was never interrupted."""
    whole, optimizer = parameters(), make()
    advance(optimizer, whole, optimizer.init(whole), 0, 10)
    own, before = parameters(), make()
    stored = through_a_file(advance(before, own, before.init(own), 0, 4))
    after = make()
    copies = {name: tensor.clone() for name, tensor in own.items()}
    after.init(copies)
    advance(after, copies, stored, 4, 10)
    for name in whole:
        assert torch.equal(copies[name], whole[name]), name


class Forgetful(AbstractOptimizer):
    """Broken on purpose: works on as if it had never been interrupted, whatever state it is given."""

    def __init__(self) -> None:
        self._inner = make(Component("adam"))()
        self._state: OptimizerState | None = None

    @property
    def lr(self) -> float:
        return self._inner.lr

    @property
    def scope(self) -> Scope:
        return self._inner.scope

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        self._state = self._inner.init(parameters)
        return self._state

    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        return parameters

    def update(
        self,
        gradients: Mapping[str, Tensor | None],
        parameters: Mapping[str, Tensor],
        state: OptimizerState,
        lr: float,
        whole_norms: WholeNorms | None = None,
    ) -> OptimizerState:
        assert self._state is not None
        self._state = self._inner.update(gradients, parameters, self._state, lr)
        return self._state


@OPTIMIZER
def test_optimizer_resumes_to_the_same_bits(component: Component) -> None:
    check_resumes(make(component))


def test_resume_check_finds_a_forgetful_optimizer() -> None:
    with pytest.raises(AssertionError):
        check_resumes(Forgetful)


@OPTIMIZER
def test_update_writes_into_the_given_tensors_and_counts(component: Component) -> None:
    own, optimizer = parameters(), make(component)()
    state = optimizer.init(own)
    assert state.shared.step.item() == 0 and state.shared.lr.item() == optimizer.lr
    assert optimizer.prepare(own, state) is own
    state = advance(optimizer, own, state, 0, 3)
    assert all(not torch.equal(own[name], start) for name, start in parameters().items())
    assert state.shared.step.item() == 3
    assert state.shared.lr.item() == optimizer.lr / 3
    assert state.shared.step.dtype == state.shared.lr.dtype == torch.float64


@OPTIMIZER
def test_no_gradient_leaves_parameter_and_slots_alone(component: Component) -> None:
    own, optimizer = parameters(), make(component)()
    state = advance(optimizer, own, optimizer.init(own), 0, 2)
    before = through_a_file(state).slots.get("b.c", {})
    kept = own["b.c"].clone()
    state = optimizer.update({**gradients(2), "b.c": None}, own, state, lr=0.01)
    state = optimizer.update({"a": gradients(3)["a"]}, own, state, lr=0.01)
    assert torch.equal(own["b.c"], kept)
    assert all(torch.equal(state.slots["b.c"][slot], tensor) for slot, tensor in before.items())


@OPTIMIZER
def test_parameters_that_require_gradients_may_be_given_as_they_are(component: Component) -> None:
    plain, leaves, optimizer = parameters(), parameters(), make(component)()
    for leaf in leaves.values():
        leaf.requires_grad_().grad = torch.ones_like(leaf)
    advance(optimizer, leaves, optimizer.init(leaves), 0, 3)
    optimizer = make(component)()
    advance(optimizer, plain, optimizer.init(plain), 0, 3)
    assert all(torch.equal(plain[name], leaf) for name, leaf in leaves.items())
    assert all(torch.equal(leaf.grad, torch.ones_like(leaf)) for leaf in leaves.values() if leaf.grad is not None)


@OPTIMIZER
def test_state_of_other_tensors_is_taken_over(component: Component) -> None:
    whole, own = parameters(), parameters()
    optimizer = make(component)()
    advance(optimizer, whole, optimizer.init(whole), 0, 6)
    state = advance(optimizer, own, optimizer.init(own), 0, 3)
    moved = {name: tensor.clone() for name, tensor in own.items()}
    advance(optimizer, moved, state, 3, 6)
    assert all(torch.equal(moved[name], whole[name]) for name in whole)


def test_ours_and_torch_optim_agree_when_driven_alike() -> None:
    ours, theirs = parameters(), parameters()
    first, second = make(Component("adamw"))(), TorchOptimizer(torch.optim.AdamW, lr=1e-3)
    assert isinstance(first, Optimizer)
    advance(first, ours, first.init(ours), 0, 20)
    advance(second, theirs, second.init(theirs), 0, 20)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_step_of_a_state_decides_the_bias_correction() -> None:
    fresh, late, optimizer = parameters(), parameters(), make(Component("adam"))()
    state = optimizer.init(fresh)
    optimizer.update(gradients(0), fresh, state, lr=0.1)
    later = replace(state.shared, step=torch.tensor(1000.0, dtype=torch.float64))
    optimizer.update(gradients(0), late, replace(state, shared=later), lr=0.1)
    assert not torch.allclose(fresh["a"], late["a"])
