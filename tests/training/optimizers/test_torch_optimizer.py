import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from weft.errors import UsageError
from weft.training.optimizers import TorchOptimizer


def test_it_is_torch_optim_to_the_bit() -> None:
    ours, theirs = torch.ones(5), nn.Parameter(torch.ones(5))
    optimizer = TorchOptimizer(torch.optim.NAdam, lr=0.1, weight_decay=0.01)
    reference = torch.optim.NAdam([theirs], lr=0.1, weight_decay=0.01)
    state = optimizer.init({"w": ours})
    for step in range(20):
        gradient = torch.sin(torch.arange(5.0) + step)
        theirs.grad = gradient.clone()
        reference.step()
        state = optimizer.update({"w": gradient}, {"w": ours}, state, lr=0.1)
    assert torch.equal(ours, theirs)
    assert state.slots["w"].keys() == {"step", "exp_avg", "exp_avg_sq", "mu_product"}


def test_schedule_scales_groups_with_learning_rates_of_their_own() -> None:
    def two_groups(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        head: dict[str, Any] = {"params": parameters[1:], "lr": lr / 10}
        return torch.optim.SGD([{"params": parameters[:1]}, head], lr=lr)

    own = {"body": torch.zeros(1), "head": torch.zeros(1)}
    optimizer = TorchOptimizer(two_groups, lr=1.0)
    ones = {"body": torch.ones(1), "head": torch.ones(1)}
    optimizer.update(ones, own, optimizer.init(own), lr=0.5)
    assert own["body"].item() == -0.5 and own["head"].item() == pytest.approx(-0.05)


class Countdown(torch.optim.Optimizer):
    """Keeps plain numbers in its state, as optimizers outside torch.optim do: steps of 1, 1/2, 1/4."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["size"] = state.get("size", 2.0) / 2
            parameter.sub_(state["size"])


def test_numbers_in_the_state_become_scalar_tensors_and_come_back() -> None:
    own = {"w": torch.zeros(())}
    optimizer = TorchOptimizer(Countdown, lr=1.0)
    state = optimizer.update({"w": torch.ones(())}, own, optimizer.init(own), lr=1.0)
    assert (state.slots["w"]["step"].dtype, state.slots["w"]["size"].dtype) == (torch.int64, torch.float64)
    other = TorchOptimizer(Countdown, lr=1.0)
    state = other.update({"w": torch.ones(())}, own, state, lr=1.0)
    assert (own["w"].item(), state.slots["w"]["step"].item()) == (-1.5, 2)


def test_a_state_may_be_used_without_init_and_is_not_written_to() -> None:
    own, gradient = {"w": torch.ones(3)}, {"w": torch.ones(3)}
    first = TorchOptimizer(torch.optim.Adam, lr=0.1)
    state = first.update(gradient, own, first.init(own), lr=0.1)
    stored = replace(state, slots={"w": {key: value.clone() for key, value in state.slots["w"].items()}})
    second = TorchOptimizer(torch.optim.Adam, lr=0.1)
    assert second.update(gradient, own, stored, lr=0.1).shared.step.item() == 2
    assert stored.slots["w"]["step"].item() == 1


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda: TorchOptimizer(torch.optim.LBFGS, lr=1.0), "evaluates the loss itself.*LBFGS"),
        (lambda: TorchOptimizer(torch.optim.Adam, lr=1.0, betas=(2.0, 0.9)), "does not take these options"),
        (lambda: TorchOptimizer(torch.optim.Adam, lr=1.0, rho=1.0), "does not take these options"),
        (lambda: TorchOptimizer(torch.optim.Adam, lr=math.nan), "out of range"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(make: Callable[[], TorchOptimizer], fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        make().init({"w": torch.ones(2)})


def test_state_of_another_model_is_refused() -> None:
    optimizer = TorchOptimizer(torch.optim.Adam, lr=0.1)
    state = optimizer.init({"other": torch.ones(2)})
    with pytest.raises(UsageError, match=r"another model.*other"):
        optimizer.update({"w": torch.ones(2)}, {"w": torch.ones(2)}, state, lr=0.1)


class Listkeeper(torch.optim.SGD):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["history"] = [1, 2]


def test_state_that_no_checkpoint_can_hold_is_refused() -> None:
    own, optimizer = {"w": torch.ones(2)}, TorchOptimizer(Listkeeper, lr=0.1)
    with pytest.raises(UsageError, match=r"neither tensor nor number.*history: list"):
        optimizer.update({"w": torch.ones(2)}, own, optimizer.init(own), lr=0.1)
