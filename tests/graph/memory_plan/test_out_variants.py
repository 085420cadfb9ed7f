"""Writing into given memory: the same bits as making one's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

from weft.graph import capture
from weft.graph.memory_plan.out_variants import is_pointwise, written_into

aten = torch.ops.aten

STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1.5,
    "addmm": lambda x: torch.addmm(x[0], x, x),
    "cat": lambda x: torch.cat([x, x]),
    "clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "full_like": lambda x: torch.full_like(x, 2.5),
    "gelu": functional.gelu,
    "log_softmax": lambda x: functional.log_softmax(x, 1),
    "mean": lambda x: x.mean(1),
    "mm": lambda x: x @ x,
    "pow": lambda x: x**3,
    "relu": lambda x: functional.relu(x - 0.5),
    "sum": lambda x: x.sum(0, keepdim=True),
    "to": lambda x: x.double(),
    "where": lambda x: torch.where(x > 0.5, x, -x),
    "zeros_like": torch.zeros_like,
}


def last_call(step: Callable[[Tensor], Tensor], x: Tensor) -> fx.Node:
    graph = capture(lambda state, batch: (step(batch), state), (), x)
    node: fx.Node = graph.result_nodes[0]
    return node


@pytest.mark.parametrize("name", STEPS)
def test_out_variant_has_the_bits_of_the_operator(name: str) -> None:
    x = torch.rand(7, 7, generator=torch.Generator().manual_seed(0))
    node = last_call(STEPS[name], x)
    call = written_into(node)
    assert call is not None, "has a form that writes"
    expected = STEPS[name](x)
    memory = torch.full_like(expected, 99)
    values: dict[fx.Node, Any] = {node: memory}

    def value(source: fx.Node) -> Any:
        if source not in values:
            args, kwargs = fx.node.map_arg((source.args, source.kwargs), value)
            values[source] = x if source.op == "placeholder" else source.target(*args, **kwargs)  # type: ignore[operator]
        return values[source]

    target, args, kwargs = fx.node.map_arg(call, value)
    target(*args, **kwargs)
    assert torch.equal(memory, expected) and memory.stride() == expected.stride()


@pytest.mark.parametrize(
    "step",
    [
        lambda x: functional.pad(x, (1, 1)),  # its form that writes computes elsewhere and copies
        lambda x: x.view(-1),
        lambda x: functional.layer_norm(x, (3,)),
    ],
)
def test_what_has_no_kernel_that_writes_is_left_alone(step: Callable[[Tensor], Tensor]) -> None:
    assert written_into(last_call(step, torch.ones(3, 3))) is None


def test_element_wise_is_what_reads_at_its_own_place_only() -> None:
    x = torch.ones(3, 3)
    assert is_pointwise(last_call(lambda x: x * 2, x)) and is_pointwise(last_call(torch.clone, x))
    assert not is_pointwise(last_call(lambda x: x @ x, x)) and not is_pointwise(last_call(lambda x: x.cumsum(0), x))
