"""LARS and LAMB: the papers' formulas, and the same update from pieces, with norms of the whole."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from weft.errors import UsageError
from weft.training.optimizers import LAMB, LARS, AbstractRule, Optimizer, Shared

RULES = [LARS(weight_decay=0.1), LAMB(weight_decay=0.1), LARS(), LAMB(weight_decay=0)]


def shared_at(step: int, lr: float = 0.5) -> Shared:
    return Shared(torch.tensor(lr, dtype=torch.float64), torch.tensor(float(step), dtype=torch.float64))


def test_lars_goes_as_far_as_the_ratio_of_norms_says() -> None:
    weight, gradient = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0])
    rule = LARS(momentum=0.9, trust=0.01, weight_decay=0.1)
    value, slots = rule.update_rule(gradient, weight, {"velocity": torch.tensor([1.0, 1.0])}, shared_at(1))
    rate = 0.5 * 0.01 * 5 / (2 + 0.1 * 5)
    velocity = 0.9 + rate * (gradient + 0.1 * weight)
    torch.testing.assert_close(slots["velocity"], velocity)
    torch.testing.assert_close(value, weight - velocity)


def test_lamb_goes_as_far_as_the_parameter_is_long() -> None:
    weight, gradient = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])
    rule = LAMB(eps=0.0, weight_decay=0.0)
    value, _ = rule.update_rule(gradient, weight, rule.initial_slots(weight), shared_at(1))
    direction = torch.tensor([1.0, -1.0])  # Adam's first step, whatever the gradient's size
    torch.testing.assert_close(value, weight - 0.5 * 5 / 2**0.5 * direction)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_tensor_of_zeros_leaves_them(rule: AbstractRule) -> None:
    weight = torch.zeros(3)
    value, _ = rule.update_rule(torch.ones(3), weight, rule.initial_slots(weight), shared_at(1))
    assert value.isfinite().all() and (value < 0).all()


def update(rule: AbstractRule, begin: int, end: int, norms: Mapping[str, Tensor] | None) -> tuple[Tensor, list[Tensor]]:
    """Two tensors, of which the elements from `begin` to `end` are here; and the norms that were asked for."""
    weights = {name: torch.linspace(-1, 2, 100)[begin:end] * scale for name, scale in (("a", 1.0), ("b", 7.0))}
    gradients = {name: weight.sin() for name, weight in weights.items()}
    optimizer, asked = Optimizer(rule, lr=0.1), list[Tensor]()

    def whole_norms(own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        asked.append(torch.stack(list(own.values())))
        return norms or own

    optimizer.update(gradients, weights, optimizer.init(weights), 0.1, whole_norms)
    return torch.cat(list(weights.values())), asked


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_pieces_with_norms_of_the_whole_are_pieces_of_the_update(rule: AbstractRule) -> None:
    whole, (norms,) = update(rule, 0, 100, None)  # one call for all tensors
    parts = [update(rule, begin, begin + 50, None)[1][0] for begin in (0, 50)]
    torch.testing.assert_close(torch.stack(parts).square().sum(0).sqrt(), norms)
    given = dict(zip("ab", norms, strict=True))
    first, second = (update(rule, begin, begin + 50, given)[0].view(2, 50) for begin in (0, 50))
    torch.testing.assert_close(torch.cat([first, second], 1).view(-1), whole)
    alone = update(rule, 0, 50, None)[0].view(2, 50)
    assert not torch.allclose(alone, first, rtol=1e-6)  # planted: a norm over one part


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="momentum"):
        LARS(momentum=1.0)
    with pytest.raises(UsageError, match="beta2"):
        LAMB(beta2=1.5)
