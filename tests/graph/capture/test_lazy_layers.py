"""Lazy layers get their sizes from shapes, and the initial values of a model with sizes given."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from weft.errors import GraphError
from weft.graph import build_sized
from weft.specs import TensorSpec


class Network(nn.Module):
    """Draws in its constructor too, between layers."""

    def __init__(self, is_lazy: bool) -> None:
        super().__init__()
        self.convolution = nn.LazyConv2d(4, 3) if is_lazy else nn.Conv2d(3, 4, 3)
        self.norm = nn.LazyBatchNorm2d() if is_lazy else nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.randn(4, 1, 1))
        self.head = nn.Sequential(nn.Flatten(), nn.LazyLinear(5) if is_lazy else nn.Linear(144, 5), nn.Linear(5, 2))
        self.early = nn.LazyLinear(3, bias=False) if is_lazy else nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first = self.early(x).mean()
        return self.head(self.norm(self.convolution(x)) * self.scale) + first  # type: ignore[no-any-return]


def seeded(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(7)
    return build(), torch.get_rng_state()


def test_initial_values_and_the_random_state_are_those_of_the_model_with_sizes_given() -> None:
    lazy, after_lazy = seeded(lambda: build_sized(lambda: Network(is_lazy=True), torch.ones(2, 3, 8, 8)))
    plain, after_plain = seeded(lambda: Network(is_lazy=False))
    assert torch.equal(after_lazy, after_plain)
    expected = plain.state_dict()
    assert lazy.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in lazy.state_dict().items())
    assert [type(module) for module in lazy.modules()] == [type(module) for module in plain.modules()]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(lazy(x), plain(x))


def test_a_specification_will_do_and_nothing_is_left_behind() -> None:
    before = nn.LazyLinear.__init__
    module = build_sized(lambda: nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(3)), TensorSpec((4, 6)))
    assert [tuple(p.shape) for p in module.parameters()] == [(2, 6), (2,), (3, 2), (3,)]
    assert nn.LazyLinear.__init__ is before
    assert next(module.children())._forward_pre_hooks == {}
    assert isinstance(nn.LazyLinear(2).weight, nn.UninitializedParameter)


def test_a_layer_that_nothing_reaches_is_named() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.LazyLinear(2), nn.LazyLinear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    with pytest.raises(GraphError, match=r"nothing reaches a lazy layer \(spare\)"):
        build_sized(Spare, torch.ones(2, 3))


def test_a_forward_pass_that_needs_values_is_refused() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LazyLinear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(GraphError, match="without values"):
        build_sized(Decides, torch.ones(2, 3))


def test_a_build_that_changes_is_refused() -> None:
    layers: Iterator[Callable[[], nn.Module]] = iter([lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d])
    with pytest.raises(GraphError, match="other lazy layers the second time"):
        build_sized(lambda: nn.Sequential(next(layers)()), torch.ones(2, 3))
