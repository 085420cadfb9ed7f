"""Gradients of weights that are put off are those of one backward pass, to the bits, and computed once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.distributed.placement.pipeline.put_off import Postponement, PutOff
from weft.errors import UsageError


class Twice(nn.Module):
    """A layer that is used twice, one after the other; one that is used beside the way of the input; and a weight that
    is used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own, self.offset = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.relu(self.layer(x))) + self.own(self.offset)
        out: Tensor = y * (1 + self.own.weight.sum())
        return out


def conv1d(bias: bool) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer: nn.Module = Conv1D(6, 4)  # type: ignore[no-untyped-call]
    layer.get_parameter("bias").requires_grad_(bias)
    return layer


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 4)), (2, 4)),
    "one layer": (lambda: nn.Linear(4, 4), (4,)),
    "no bias": (lambda: nn.Linear(4, 4, bias=False), (2, 3, 4)),
    "shared": (Twice, (2, 4)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
    "recurrent": (lambda: nn.RNNCell(4, 4), (2, 4)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 7, 8)),
    "convolution of one sample": (lambda: nn.Conv1d(4, 6, 3, dilation=2), (4, 9)),
    "convolution with reflection": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 7, 8)),
    "Conv1D": (lambda: conv1d(True), (2, 3, 4)),
    "Conv1D, bias frozen": (lambda: conv1d(False), (2, 3, 4)),
}


def gradients_of(module: nn.Module, inputs: list[Tensor], *, puts_off: bool) -> dict[str, Tensor | None]:
    """Of all micro-batches together, and of their inputs."""
    module.zero_grad()
    found: dict[str, Tensor | None] = {}
    names = {id(p): name for name, p in module.named_parameters()}
    parameters = dict(module.named_parameters())
    for i, x in enumerate(inputs):
        own, later = x.detach().requires_grad_(), PutOff()
        if puts_off:
            with Postponement(module).use(later):
                y = module(own)
        else:
            y = module(own)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
        for name, grow in later.make(names):
            parameters[name].grad = grow(parameters[name].grad)
        found[f"input {i}"] = own.grad
    return {**found, **{name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}}


@pytest.mark.parametrize("name", MODULES)
def test_the_gradients_are_those_of_one_pass(name: str) -> None:
    torch.manual_seed(3)
    make, shape = MODULES[name]
    module, inputs = make().double(), [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    whole, later = (gradients_of(module, inputs, puts_off=puts_off) for puts_off in (False, True))
    torch.testing.assert_close(later, whole, rtol=1e-14, atol=1e-14)


class CountingProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        self.num_products += func in (aten.mm.default, aten.addmm.default, aten.addmm_.default)
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice_and_those_of_weights_are_made_later() -> None:
    module, x, later = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(8, 16), PutOff()
    with CountingProducts() as first, Postponement(module).use(later):
        module(x.requires_grad_()).sum().backward()
    assert first.num_products == 8
    with CountingProducts() as second:
        for _name, grow in later.make({id(p): name for name, p in module.named_parameters()}):
            grow(None)
    assert second.num_products == 4
    assert not later.uses


def test_a_module_is_left_as_it_was() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="stop"), Postponement(module).use(PutOff()):
        assert "forward" in vars(module)
        raise RuntimeError("stop")
    assert "forward" not in vars(module)


def test_nothing_is_put_off_where_another_has_given_a_layer_its_forward() -> None:
    module, later = nn.Linear(4, 4), PutOff()
    vars(module)["forward"] = forward = lambda x: x @ module.weight
    with Postponement(module).use(later):
        assert vars(module)["forward"] is forward
        module(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert vars(module)["forward"] is forward and not later.uses
    assert module.weight.grad is not None


def test_autocast_leaves_the_gradients_to_autograd() -> None:
    module, later = nn.Linear(4, 4), PutOff()
    with torch.autocast("cpu", dtype=torch.bfloat16), Postponement(module).use(later):
        module(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert not later.uses and module.weight.grad is not None


def test_an_input_that_is_written_in_place_is_found() -> None:
    """Autograd, which would say so, does not know that the weight waits for it."""
    module, later = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), PutOff()
    x = torch.ones(2, 4, requires_grad=True)
    with Postponement(module).use(later):
        between = module[0](x)
        out = module[1](between)
    with torch.no_grad():
        between.zero_()
    out.sum().backward()
    with pytest.raises(UsageError, match=r"changed in place .* \(layer: Linear, shape: \[2, 4\]\); .* schedule=1f1b"):
        list(later.make({id(p): name for name, p in module.named_parameters()}))
