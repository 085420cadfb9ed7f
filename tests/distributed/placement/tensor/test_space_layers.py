"""Windows of every kind over rows in parts, against the layer itself on the whole picture."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.rules import Rules
from weft.distributed.placement.tensor.region import Region
from weft.distributed.placement.tensor.space import split_space
from weft.distributed.placement.tensor.space_rows import Window
from weft.distributed.virtual import run_virtual


def compare(make: Any, num_rows: int, num_ranks: int) -> None:
    """Outputs, gradients of the input, and those of parameters added up over ranks."""

    def run(group: AbstractGroup | None) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(make()).double()
        if group is not None:
            split_space(net, Region(group), Rules((("*", "space"),)))
        x = torch.randn(2, 3, num_rows, 7, dtype=torch.float64, requires_grad=True)
        y: Tensor = net(x)
        y.backward(torch.randn(y.shape, dtype=torch.float64))
        return y.detach(), x.grad, [p.grad for p in net.parameters()]

    expected, gradient, of_parameters = run(None)
    found = run_virtual(run, num_ranks).results
    for own, own_gradient, _ in found:
        torch.testing.assert_close(own, expected)
        torch.testing.assert_close(own_gradient, gradient)
    for index, parameter in enumerate(of_parameters):
        torch.testing.assert_close(sum(rank[2][index] for rank in found), parameter)


LAYERS = {
    "stride and padding": lambda: nn.Conv2d(3, 4, 5, stride=2, padding=2),
    "dilation": lambda: nn.Conv2d(3, 4, (3, 2), dilation=(2, 1), padding=(2, 0)),
    "same, with an even kernel": lambda: nn.Conv2d(3, 4, 4, padding="same", bias=False),
    "groups, valid": lambda: nn.Conv2d(3, 6, 3, padding="valid", groups=3),
    "longer strides than kernels": lambda: nn.Conv2d(3, 4, 2, stride=3),
    "maximum": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(3, stride=2, padding=1)),
    "mean": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d((2, 3), stride=1, padding=(1, 1))),
    "norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own, on the whole picture
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("num_rows", [8, 11])
def test_parts_give_what_the_whole_gives(make: Any, num_rows: int) -> None:
    compare(make, num_rows, 3)


def test_more_ranks_than_rows() -> None:
    compare(lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)), 5, 4)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(7, 13), st.integers(2, 4)
)
def test_any_window(kernel: int, stride: int, padding: int, dilation: int, num_rows: int, num_ranks: int) -> None:
    window = Window(kernel, stride, padding, padding, dilation)
    if window.num_outputs(num_rows) < 1:
        return
    size = (kernel, 1)
    compare(lambda: nn.Conv2d(3, 2, size, (stride, 1), (padding, 0), (dilation, 1)), num_rows, num_ranks)


def test_running_statistics_are_those_of_the_whole() -> None:
    def run(group: AbstractGroup | None) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2, momentum=None))
        if group is not None:
            split_space(net, Region(group), Rules((("*", "space"),)))
        for _ in range(2):
            net(torch.randn(4, 1, 5, 5))
        return [buffer.double() for buffer in net.buffers()]

    for rank in run_virtual(run, 2).results:
        for found, expected in zip(rank, run(None), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
