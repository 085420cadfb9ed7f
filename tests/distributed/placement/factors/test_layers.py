"""Layers that keep factors: the rows multiply to autograd's gradient, and whoever asks for a gradient gets one."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from weft.distributed.placement.factors import layers as module
from weft.distributed.placement.factors.layers import DENSE, FactoredLayers


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 0)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def factored(model: nn.Module) -> FactoredLayers:
    found = FactoredLayers()
    found.find([model], {id(p): name for name, p in model.named_parameters() if p.requires_grad})
    return found


def grad_of(model: nn.Module, name: str) -> Tensor:
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    return gradient


def gradients_of(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(model)
    loss(plain).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer: nn.Module = Conv1D(6, 4)  # type: ignore[no-untyped-call]
    return layer


class Twice(nn.Module):
    """A layer that is used again, and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(self.first(x)).tanh())
        return y


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (net, (5, 4)),
    "positions": (net, (2, 3, 4)),
    "one sample": (net, (4,)),
    "Conv1D": (conv1d, (2, 3, 4)),
    "shared": (Twice, (5, 4)),
    "checkpoint": (Checkpointed, (5, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_multiply_to_the_gradient(name: str) -> None:
    make, shape = MODELS[name]
    model, x = make(), batch(*shape)
    expected = gradients_of(model, lambda m: m(x).square().mean())
    found, called = factored(model), []
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, own=parameter_name: called.append(own))
    model(x).square().mean().backward()
    assert found.weights
    assert sorted(called) == sorted(expected)  # hooks of weights run although there is no gradient
    for weight_name, entry in found.weights.items():
        assert entry.weight.grad is None
        assert entry.is_grad_kept()
        torch.testing.assert_close(entry.multiply(entry.take()), expected.pop(weight_name))
    for other, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(other).grad, gradient)


def test_rows_of_several_backward_calls_are_appended_and_scaled() -> None:
    model, x = net(), batch(5, 4)
    expected = gradients_of(model, lambda m: 3 * m(x).sum() + 3 * m(2 * x).sum())
    found = factored(model)
    found.scale = lambda: 3.0
    model(x).sum().backward()
    model(2 * x).sum().backward()
    entry = found.weights["0.weight"]
    assert entry.count() == 10
    torch.testing.assert_close(entry.multiply(entry.take()), expected["0.weight"])
    assert entry.count() == 0


def test_a_forward_is_expected_until_its_graph_is_gone() -> None:
    found = factored(model := net())
    entry, loss = found.weights["0.weight"], model(batch(5, 4)).sum()
    assert entry.count() == 5
    with torch.no_grad():
        model(batch(5, 4))
    assert entry.count() == 5
    del loss
    assert entry.count() == 0


def test_a_forward_that_no_backward_comes_to_is_not_expected_for_ever() -> None:
    """A script that keeps the losses of its evaluation would send more zeros with every step."""
    found = factored(model := net())
    entry, kept = found.weights["0.weight"], model(batch(5, 4)).sum()
    counts = []
    for _ in range(3):
        model(batch(2, 4)).sum().backward()
        counts.append(entry.count())
        entry.take()
    assert counts == [7, 7, 2]
    assert kept.requires_grad


# ---- whoever wants the gradient itself


def plain(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, x).float()


def with_a_hook(model: nn.Module, x: Tensor) -> Tensor:
    weight = model.get_parameter("0.weight")
    weight.register_hook(lambda gradient: 2 * gradient)
    model.get_parameter("3.weight").register_post_accumulate_grad_hook(lambda _: None)
    model.get_parameter("3.weight").register_post_accumulate_grad_hook(lambda _: None)
    return plain(model, x)


def under_func(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = torch.func.vmap(model)(x).square().mean()
    return loss


@pytest.mark.parametrize("loss", [under_autocast, with_a_hook, under_func])
def test_a_gradient_that_others_want_is_made(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model, x = net(), batch(5, 4)
    expected = gradients_of(model, lambda m: loss(m, x))
    found = factored(model)
    value = loss(model, x)
    assert {entry.count() for entry in found.weights.values()} == {DENSE}
    value.backward()
    for name, entry in found.weights.items():
        assert not entry.blocks
        assert not entry.is_grad_kept()
        assert torch.equal(grad_of(model, name), expected[name])


def test_what_autograd_is_asked_for_is_given() -> None:
    model, x = net(), batch(5, 4)
    weight = model.get_parameter("0.weight")
    (expected,) = torch.autograd.grad(plain(model, x), weight)
    found = factored(model)
    (gradient,) = torch.autograd.grad(plain(model, x), weight)
    assert torch.equal(gradient, expected)
    assert not found.weights["0.weight"].blocks


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_of_gradients_is_made() -> None:
    model, x = net(), batch(5, 4)

    def penalty(m: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(plain(m, x), m.get_parameter("0.weight"), create_graph=True)
        return slope.square().sum()

    expected = gradients_of(model, penalty)
    found = factored(model)
    penalty(model).backward(create_graph=True)
    for name, gradient in expected.items():
        given = grad_of(model, name)
        rows = found.weights[name].take() if name in found.weights else None
        total = found.weights[name].multiply(rows, given) if rows is not None and len(rows) else given
        torch.testing.assert_close(total.detach(), gradient)
        model.get_parameter(name).grad = None


def test_gradients_that_stay_on_the_rank_are_made() -> None:
    model, x = net(), batch(5, 4)
    expected = gradients_of(model, lambda m: plain(m, x))
    found = factored(model)
    found.is_held = lambda: True
    plain(model, x).backward()
    assert torch.equal(grad_of(model, "0.weight"), expected["0.weight"])
    assert found.weights["0.weight"].count() == 0


def test_a_weight_that_is_used_by_other_means_has_both() -> None:
    model, x = net(), batch(5, 4)
    weight = model.get_parameter("0.weight")
    found = factored(model)
    (plain(model, x) + weight.square().sum()).backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())
    assert not found.weights["0.weight"].is_grad_kept()
    assert len(found.weights["0.weight"].take()) == 5


# ---- which layers


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6))
    model[1].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = nn.Linear(4, 6)
    model.weight.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Doubled(4, 6),
        tied,
        frozen,
        lambda: parametrizations.weight_norm(nn.Linear(4, 6)),
        lambda: nn.RNNCell(4, 6),
    ],
)
def test_layers_that_are_left_alone(make: Callable[[], nn.Module]) -> None:
    assert not factored(make()).weights


def test_small_weights_travel_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 4 * 6 * 4)
    assert list(factored(net()).weights) == ["0.weight"]


def copies(model: nn.Module) -> Iterator[nn.Module]:
    yield copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def test_a_copy_is_a_plain_model() -> None:
    found, x = factored(model := net()), batch(5, 4)
    for copied in copies(model):
        plain(copied, x).backward()
        gradient: Any = copied.get_parameter("0.weight").grad
        assert gradient is not None
        assert found.weights["0.weight"].count() == 0
