"""Compiled regions have the bits of ATen, are refused if they do not, and are left out where nothing compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.graph import Graph, capture
from weft.graph.exact_fusion import bind_kernel, find_kernel, kernel
from weft.graph.exact_fusion.cpp_source import source_of
from weft.graph.fusion.region import Region, make_region

aten = torch.ops.aten

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y, s: x + y,
    "sum with a number": lambda x, y, s: x + 0.3,
    "scaled sum": lambda x, y, s: torch.add(x, y, alpha=0.3),
    "sum with a scalar": lambda x, y, s: x + s,
    "scaled difference": lambda x, y, s: torch.sub(x, y, alpha=0.7),
    "product": lambda x, y, s: x * y,
    "product with a number": lambda x, y, s: x * 0.9,
    "product with a scalar": lambda x, y, s: x * s,
    "quotient": lambda x, y, s: x / y,
    "quotient by a number": lambda x, y, s: x / 3.3,
    "negation": lambda x, y, s: -x,
    "reciprocal": lambda x, y, s: x.reciprocal(),
    "relu": lambda x, y, s: x.relu(),
    "gradient of relu": lambda x, y, s: aten.threshold_backward(x, y, 0),
    "sum with a product": lambda x, y, s: torch.addcmul(x, y, x, value=-0.3),
    "sum with a scalar's product": lambda x, y, s: torch.addcmul(x, y, s, value=-1),
    "sum with a quotient": lambda x, y, s: torch.addcdiv(x, y, x, value=-0.3),
    "near mean": lambda x, y, s: torch.lerp(x, y, 0.1),
    "far mean": lambda x, y, s: torch.lerp(x, y, 0.9),
    "momentum": lambda x, y, s: torch.addcmul(x, torch.add(y * 0.9, x, alpha=1.0), s, value=-1),
}


def captured(function: Callable[..., Tensor], size: int, dtype: torch.dtype = torch.float32) -> Graph:
    batch = (torch.ones(size, dtype=dtype), torch.ones(size, dtype=dtype), torch.tensor(1.0, dtype=dtype))
    return capture(lambda state, batch: (function(*batch), state), (), batch)


def region_of_all(graph: Graph) -> Region:
    calls = [operator.node for operator in graph.operators]
    inputs = dict.fromkeys(source for call in calls for source in call.all_input_nodes if source not in calls)
    return make_region(calls, list(inputs), calls[-1:])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_operator_of_the_table_has_the_bits_of_aten(name: str, dtype: torch.dtype) -> None:
    assert find_kernel(region_of_all(captured(FUNCTIONS[name], 5, dtype))) is not None


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("momentum", "aten::addcmul<T>(in1, v1, in2, T(-1.0))", "in1 - v1 * in2"),  # rounded twice
        ("relu", "aten::relu<T>(in0)", "in0 > T(0) ? in0 : T(0)"),  # loses NaN
        ("quotient by a number", "aten::div<T>(in0, T(3.3))", "in0 * T(1 / 3.3)"),
        ("product", "aten::mul<T>(in0, in1)", "std::copysign(in0 * in1, in0)"),
    ],
)
def test_a_kernel_with_other_bits_is_found_out(name: str, right: str, wrong: str) -> None:
    region = region_of_all(captured(FUNCTIONS[name], 5))
    source = source_of(region)
    assert right in source
    assert not kernel.has_same_bits(kernel._compile(source.replace(right, wrong)), region)


def test_where_its_bits_differ_a_region_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_found", {})
    monkeypatch.setattr(kernel, "has_same_bits", lambda *_: False)
    assert find_kernel(region_of_all(captured(FUNCTIONS["product"], 5))) is None


def test_without_a_compiler_a_region_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_found", {})
    monkeypatch.setenv("WEFT_NO_COMPILER", "1")
    assert find_kernel(region_of_all(captured(FUNCTIONS["sum"], 5))) is None


@pytest.mark.parametrize("size", [1, 7, 4 * kernel.GRAIN + 5])
@pytest.mark.parametrize("into", [{}, {0: 0}, {0: 3}])
def test_a_kernel_writes_where_it_is_told(size: int, into: dict[int, int]) -> None:
    region = region_of_all(captured(FUNCTIONS["momentum"], size))
    generator = torch.Generator().manual_seed(1)
    given: list[Any] = [torch.randn(like.shape, generator=generator) for like in region.inputs]
    (expected,) = region.run([tensor.clone() for tensor in given])
    given.append(torch.empty(size))
    made = bind_kernel(region, into)(list(given))
    assert torch.equal(given[into[0]] if into else made[0], expected)
    assert len(made) == (not into)


def test_one_source_serves_all_sizes() -> None:
    small, large = (region_of_all(captured(FUNCTIONS["momentum"], size)) for size in (3, 300))
    assert small is not large
    assert find_kernel(small) is find_kernel(large)
