"""Momentum that ranks keep themselves: what is left to the optimizer, with that of weight decay, is dense momentum."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from weft.errors import PlanError
from weft.training.optimizers import SGD, AbstractRule, Momentum, Nesterov, Optimizer, Shared, split_momentum
from weft.training.optimizers.momentum import MomentumOfDecay

DECAY = 0.01
RULES = pytest.mark.parametrize("rule", [Momentum(0.9, 0.0, DECAY), Nesterov(0.9, DECAY)])


def start() -> Tensor:
    return torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
    weights = {"w": start()}
    state = optimizer.init(weights)
    for gradient in gradients:
        state = optimizer.update({"w": gradient}, weights, state, 0.1)
    return weights["w"]


def sent_instead(gradients: list[Tensor], momentum: float, *, is_nesterov: bool) -> list[Tensor]:
    """By a rank that sends all of its velocity, and masks nothing."""
    velocity, sent = torch.zeros_like(gradients[0]), []
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        sent.append(gradient + momentum * velocity if is_nesterov else velocity)
    return sent


def gradients_of(scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [scale * torch.randn(7, 3, dtype=torch.float64, generator=generator) for _ in range(100)]


def rest_of(rule: AbstractRule) -> tuple[Optimizer, list[Tensor], list[Tensor]]:
    gradients = gradients_of(1.0)
    rest, momentum, is_nesterov = split_momentum(Optimizer(rule, lr=0.1))
    assert isinstance(rest, Optimizer)
    return rest, gradients, sent_instead(gradients, momentum, is_nesterov=is_nesterov)


@RULES
def test_what_is_sent_and_what_is_left_are_dense_momentum(rule: AbstractRule) -> None:
    rest, gradients, sent = rest_of(rule)
    torch.testing.assert_close(trained(rest, sent), trained(Optimizer(rule, lr=0.1), gradients), rtol=0, atol=1e-12)


@RULES
def test_weight_decay_has_its_momentum(rule: AbstractRule) -> None:
    # Regression: what was left was plain SGD, whose decay is ten times too weak with a momentum of 0.9.
    rest, nothing = split_momentum(Optimizer(rule, lr=0.1)).optimizer, gradients_of(0.0)
    assert isinstance(rest, Optimizer)
    dense, before = trained(Optimizer(rule, lr=0.1), nothing), trained(Optimizer(SGD(DECAY), lr=0.1), nothing)
    torch.testing.assert_close(trained(rest, nothing), dense, rtol=1e-12, atol=0)
    assert float(dense.norm()) < 0.5 * float(before.norm())


def test_a_dense_velocity_goes_on() -> None:
    """A run that takes up dgc on the way loses nothing of what dense momentum has gathered."""
    rule, gradients = Momentum(0.9, 0.0, DECAY), gradients_of(1.0)
    dense, weights = Optimizer(rule, lr=0.1), {"w": start()}
    state = dense.init(weights)
    for gradient in gradients[:50]:
        state = dense.update({"w": gradient}, weights, state, 0.1)
    rest = split_momentum(dense).optimizer
    for sent in sent_instead(gradients[50:], 0.9, is_nesterov=False):
        state = rest.update({"w": sent}, weights, state, 0.1)
    torch.testing.assert_close(weights["w"], trained(dense, gradients), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [SGD(DECAY), Momentum(0.0, 0.0, DECAY), Momentum(0.9), Nesterov(0.9)])
def test_without_momentum_or_without_decay_nothing_is_kept(rule: AbstractRule) -> None:
    rest = split_momentum(Optimizer(rule, lr=0.1)).optimizer
    assert isinstance(rest, Optimizer) and isinstance(rest.rule, SGD)


def test_a_momentum_that_is_dampened_is_refused() -> None:
    with pytest.raises(PlanError, match="use sgd, momentum or nesterov, or compress=topk"):
        split_momentum(Optimizer(Momentum(0.9, 0.5), lr=0.1))


@pytest.mark.parametrize("is_nesterov", [False, True])
def test_the_rule_is_element_wise_and_a_graph_holds_it(is_nesterov: bool) -> None:
    rule = MomentumOfDecay(0.9, DECAY, is_nesterov)

    def update(gradient: Tensor, weight: Tensor, velocity: Tensor, lr: Tensor) -> tuple[Tensor, Tensor]:
        value, slots = rule.update_rule(gradient, weight, {"velocity": velocity}, Shared(lr, lr))
        return value, slots["velocity"]

    (gradient, weight, velocity), lr = (start() * factor for factor in (1, 2, 3)), torch.tensor(0.1)
    whole = update(gradient, weight, velocity, lr)
    row = update(gradient[2], weight[2], velocity[2], lr)
    assert rule.scope == "element" and all(torch.equal(a[2], b) for a, b in zip(whole, row, strict=True))
    graph = make_fx(update)(gradient, weight, velocity, torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(whole, graph(gradient, weight, velocity, lr), strict=True))
