"""A backward pass in two halves makes the gradients of one in a piece, and computes nothing twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.distributed.placement.pipeline.split_backward import SplitBackward


class Twice(nn.Module):
    """A layer that is used twice, one after the other and beside the way of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own, self.offset = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(torch.relu(self.layer(x))) + self.own(self.offset)
        out: Tensor = y * (1 + self.own.weight.sum())
        return out


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)),
    "one layer": lambda: nn.Linear(4, 4),
    "shared": Twice,
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "recurrent": lambda: nn.RNNCell(4, 4),
}


def both_ways(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    seed = torch.randn(module(x).shape)
    parameters = dict(module.named_parameters())
    whole = torch.autograd.grad(module(x), [x, *parameters.values()], seed)
    halves = SplitBackward([module(x)], [seed], [x], parameters)
    inputs, early = halves.inputs()
    found = {**early, **halves.weights()}
    return list(whole), [*(g for g in inputs if g is not None), *(found[name] for name in parameters)]  # type: ignore[list-item]


@pytest.mark.parametrize("name", MODULES)
def test_the_halves_make_the_gradients_of_the_whole(name: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(2, 4) if name != "transformer" else torch.randn(2, 3, 4)
    whole, halves = both_ways(MODULES[name](), x.requires_grad_())
    torch.testing.assert_close(halves, whole)


def test_a_first_stage_whose_inputs_want_no_gradient_does_all_in_the_second_half() -> None:
    module = nn.Linear(4, 4)
    halves = SplitBackward([module(torch.ones(2, 4))], [torch.ones(2, 4)], [], dict(module.named_parameters()))
    assert halves.inputs() == ([], {})
    torch.testing.assert_close(halves.weights()["bias"], torch.full((4,), 2.0))


class CountingProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_both_halves_together_take_the_products_of_one_pass() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16, requires_grad=True)
    with CountingProducts() as whole:
        module(x).sum().backward()
    with CountingProducts() as split:
        out = module(x)
        halves = SplitBackward([out], [torch.ones_like(out)], [x], dict(module.named_parameters()))
        halves.inputs()
        halves.weights()
    assert split.num_products == whole.num_products == 12
