"""A mixture of experts against a loop over tokens, its auxiliary gradients, and samples that do not see each other."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import weft
from weft.errors import UsageError
from weft.training.models import MixtureOfExperts, auxiliary_loss


def make_layer(*, adds_auxiliary: bool = True, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(6, 7, 4, **options).double()
    layer.adds_auxiliary = adds_auxiliary
    return layer


def make_tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def expert_of(layer: MixtureOfExperts, expert: int, token: Tensor) -> Tensor:
    inside = functional.gelu(token @ layer.experts.weight_in[expert] + layer.experts.bias_in[expert])
    return inside @ layer.experts.weight_out[expert] + layer.experts.bias_out[expert]


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 0.5])
def test_the_output_is_that_of_a_loop_over_tokens(capacity_factor: float | None) -> None:
    layer, x = make_layer(capacity_factor=capacity_factor).eval(), make_tokens(3, 8)
    gates, expected = layer.gate(x), torch.zeros(3, 8, 6, dtype=torch.float64)
    capacity = 999 if capacity_factor is None else capacity_factor * 2 * 8 / 4
    num_dropped = 0
    for g in range(3):
        used = [0] * 4
        for k in range(2):
            for t in range(8):
                expert = int(gates.experts_gtk[g, t, k])
                used[expert] += 1
                if used[expert] <= capacity:
                    expected[g, t] += gates.weights_gtk[g, t, k].detach() * expert_of(layer, expert, x[g, t]).detach()
                else:
                    num_dropped += 1
    torch.testing.assert_close(layer(x).detach(), expected)
    assert layer.statistics["dropped"].item() == pytest.approx(num_dropped / 48)
    assert bool(num_dropped) == (capacity_factor is not None)


def test_gradients_are_those_of_finite_differences() -> None:
    layer, x = make_layer(noisy=False, adds_auxiliary=False, capacity_factor=1.0), make_tokens(2, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: layer(x) + auxiliary_loss(layer), (x, *layer.parameters()))


def test_backward_adds_the_auxiliary_gradient_as_a_script_would() -> None:
    found = []
    for adds in (True, False):
        layer, x = make_layer(adds_auxiliary=adds), make_tokens(3, 8)
        torch.manual_seed(2)
        loss = layer(x).square().mean()
        (loss if adds else loss + auxiliary_loss(layer)).backward()
        found.append([parameter.grad for parameter in layer.parameters()])
        assert layer.auxiliary is not None and layer.auxiliary.requires_grad != adds
    torch.testing.assert_close(found[0], found[1])


def test_the_auxiliary_gradient_weighs_as_much_as_the_samples() -> None:
    layer, x = make_layer(balance=(2.0, 0.01)), make_tokens(3, 8)
    gradients = []
    for weight in (1.0, 0.25):
        torch.manual_seed(2)
        layer.weighting.replica = weight
        (layer(x) * 0).sum().backward()  # nothing but the auxiliary losses is left
        assert layer.gate.weight.grad is not None
        gradients.append(layer.gate.weight.grad)
        layer.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0] / 4)
    assert gradients[0].abs().max() > 0


def test_samples_do_not_see_each_other() -> None:
    """So that any way to deal them out gives the same: outputs, tokens left out, and the mean of auxiliary losses."""
    layer, x = make_layer(noisy=False, capacity_factor=0.5), make_tokens(4, 8)
    together, auxiliary = layer(x), layer.auxiliary
    alone, parts = [], []
    for sample in x:
        alone.append(layer(sample[None]))
        parts.append(auxiliary_loss(layer))
    torch.testing.assert_close(torch.cat(alone), together)
    torch.testing.assert_close(torch.stack(parts).mean(), auxiliary)


def test_groups_of_a_whole_batch_do_see_each_other() -> None:
    layer, x = make_layer(noisy=False, capacity_factor=0.5, groups="batch"), make_tokens(4, 8)
    assert not torch.allclose(torch.cat([layer(sample[None]) for sample in x]), layer(x))


def test_no_samples_are_computed_like_any() -> None:
    layer, x = make_layer(), make_tokens(0, 8).requires_grad_()
    layer(x).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 0}, {"capacity_factor": 0.0}, {"groups": "token"}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_layer(**options)


def test_a_script_finds_the_layer() -> None:
    assert weft.MixtureOfExperts is MixtureOfExperts and weft.auxiliary_loss is auxiliary_loss
