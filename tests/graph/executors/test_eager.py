"""What only the eager executor promises: it lives on the user's own module."""

import pytest
import torch
from torch import Tensor, nn

from tests.graph.cases import CASES
from tests.graph.contract import CHECKS, Subject, take
from weft.graph import EagerExecutor
from weft.torch_private import shares_memory

MLP = CASES[0]


def test_state_is_the_modules_own_tensors() -> None:
    module = MLP.build()
    executor = EagerExecutor(module, MLP.loss)
    state = executor.initial_state()
    _, _, after = take(executor, state, MLP.batch())
    for name, parameter in module.named_parameters():
        assert state.parameters[name] is parameter and after.parameters[name] is parameter


def test_gradient_left_by_a_use_outside_is_not_added() -> None:
    module = MLP.build()
    executor = EagerExecutor(module, MLP.loss)
    _, expected, state = take(executor, executor.initial_state(), MLP.batch())
    module(*MLP.batch(1).inputs).sum().backward()
    _, found, _ = take(executor, state, MLP.batch())
    assert all(torch.equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_module_used_outside_keeps_its_gradients() -> None:
    module = MLP.build()
    executor = EagerExecutor(module, MLP.loss)
    take(executor, executor.initial_state(), MLP.batch())
    module(*MLP.batch().inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_step_leaves_no_gradient_on_the_module() -> None:
    module = MLP.build()
    executor = EagerExecutor(module, MLP.loss)
    take(executor, executor.initial_state(), MLP.batch())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_two_executors_share_a_module_without_hearing_each_other() -> None:
    module = MLP.build()
    one, two = EagerExecutor(module, MLP.loss), EagerExecutor(module, MLP.loss)
    _, first, state = take(one, one.initial_state(), MLP.batch())
    _, second, _ = take(two, state, MLP.batch())
    assert first.keys() == second.keys() == MLP.trainable


def test_inference_that_draws_draws_from_the_state() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.randn_like(x)

    executor = EagerExecutor(Noisy(), MLP.loss)
    state, batch = executor.initial_state(), CASES[3].batch()
    before = torch.get_rng_state()
    first, again = executor.infer(state, batch), executor.infer(state, batch)
    assert torch.equal(first.predictions, again.predictions)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_that_autograd_shares_is_seen() -> None:
    tensor = torch.zeros(6)
    assert not shares_memory(tensor)
    view = tensor.view(2, 3)
    assert shares_memory(view) and shares_memory(tensor)
    assert not shares_memory(view.clone())
    assert shares_memory(torch.zeros(3).to_sparse())


def test_without_that_sight_the_sink_would_not_own_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    # Found by the contract: of (a.view(n) + b.view(n)), autograd gives a and b one piece of memory, and weighing the
    # gradients of micro-batches in place weighed them twice.
    monkeypatch.setattr("weft.graph.executors.eager.shares_memory", lambda _: False)
    check_sink_owns = {check.__name__: check for check in CHECKS}["check_sink_owns"]
    with pytest.raises(AssertionError):
        check_sink_owns(Subject("blind", EagerExecutor), {case.name: case for case in CASES}["viewed"])
