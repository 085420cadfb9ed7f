import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.optimizers import SGD, AbstractRule, Optimizer, Scope, Shared, Slots


class LookAhead(AbstractRule):
    """Takes its gradient one tenth of its step number away from the parameter."""

    @property
    def scope(self) -> Scope:
        return "element"

    def initial_slots(self, parameter: Tensor) -> Slots:
        return {}

    def new_input(self, shared: Shared) -> Shared:
        return replace(shared, step=shared.step + 1)

    def prepare_param(self, parameter: Tensor, slots: Slots, shared: Shared) -> Tensor:
        return parameter + shared.step / 10

    def update_rule(self, gradient: Tensor, parameter: Tensor, slots: Slots, shared: Shared) -> tuple[Tensor, Slots]:
        return parameter - gradient, {}


def test_prepare_gives_the_points_of_the_coming_step_and_leaves_the_parameters() -> None:
    own = {"w": torch.zeros(2, dtype=torch.float64)}
    optimizer = Optimizer(LookAhead(), lr=0.1)
    state = optimizer.init(own)
    assert optimizer.prepare(own, state)["w"].tolist() == [0.1, 0.1]
    state = optimizer.update({"w": torch.ones(2, dtype=torch.float64)}, own, state, lr=0.1)
    assert optimizer.prepare(own, state)["w"].tolist() == [-0.8, -0.8]
    assert own["w"].tolist() == [-1.0, -1.0]


def test_update_keeps_the_memory_of_the_parameters() -> None:
    own = {"w": torch.nn.Parameter(torch.zeros(4))}
    address = own["w"].data_ptr()
    optimizer = Optimizer(SGD(), lr=1.0)
    optimizer.update({"w": torch.ones(4)}, own, optimizer.init(own), lr=0.5)
    assert own["w"].data_ptr() == address and own["w"].requires_grad
    assert own["w"].tolist() == [-0.5] * 4


@pytest.mark.parametrize("lr", [-0.1, math.inf, math.nan])
def test_impossible_learning_rate_is_refused(lr: float) -> None:
    with pytest.raises(UsageError, match="out of range"):
        Optimizer(SGD(), lr=lr)
