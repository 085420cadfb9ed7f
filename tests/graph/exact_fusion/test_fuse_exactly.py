"""Exact fusion: what becomes a region, what does not, and that no bit changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.graph import Program, Signature, capture
from weft.graph.exact_fusion import fuse_exactly
from weft.graph.fusion import regions_of
from weft.graph.memory_plan import fused_program

Step = Callable[[Any, Any], tuple[Any, Any]]


def momentum(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
    velocity = {name: v * 0.9 + batch.sum() * state["w"][name] for name, v in state["v"].items()}
    weights = {name: torch.addcmul(w, velocity[name], state["lr"], value=-1) for name, w in state["w"].items()}
    return batch.sum(), {"w": weights, "v": velocity, "lr": state["lr"]}


def momentum_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    parts = ({name: torch.randn(5, 3, generator=generator) for name in "ab"} for _ in range(2))
    return {"w": next(parts), "v": next(parts), "lr": torch.tensor(0.1)}


def test_the_update_of_a_parameter_is_one_call() -> None:
    graph = fuse_exactly(capture(momentum, momentum_state(), torch.ones(4)))
    targets = [operator.target for operator in graph.operators]
    assert sum(target.startswith("weft_region.mul_mul_add") for target in targets) == 2 or len(regions_of(graph)) == 1
    assert not any(target.startswith("aten.addcmul") for target in targets)


def test_steps_write_over_the_state_with_the_same_bits(tmp_path: Path) -> None:
    graph = capture(momentum, momentum_state(), torch.ones(4))
    plain = Program(graph, folder=tmp_path)
    fused = fused_program(graph, Signature(("state",), ("state",)), may_round=False)
    expected, state = momentum_state(), momentum_state()
    for _ in range(3):
        _, expected, _ = plain(expected, torch.full((4,), 0.3))
        _, state, _ = fused(state, torch.full((4,), 0.3))
    assert all(torch.equal(state[part][name], expected[part][name]) for part in "wv" for name in "ab")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x.exp() + y.sin()).sum(),  # not in the table
        lambda x, y: (x + y[0]).cos(),  # one call, and of two shapes
        lambda x, y: ((x * 2).long() * 3 + 1).float(),  # integers
        lambda x, y: (x.double() * y.double()).float() * 3,  # types that meet
        lambda x, y: (x.t() + y) * x.t(),  # strides that meet
        lambda x, y: x * float("inf") * float("inf"),  # no number in C++
        lambda x, y: x.sum() * 2 + 1,  # scalars
    ],
)
def test_what_is_no_chain_of_one_layout_stays(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def step(state: Any, batch: Any) -> tuple[Tensor, Any]:
        return function(*batch), state

    graph = capture(step, (), (torch.ones(3, 3), torch.ones(3, 3)))
    assert not regions_of(fuse_exactly(graph))


def test_a_chain_that_needs_its_own_result_by_a_way_around_is_cut() -> None:
    def step(state: Any, batch: Tensor) -> tuple[Tensor, Any]:
        first = batch * 2 + 1
        return (first @ first) * first - first, state

    graph = fuse_exactly(capture(step, (), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))))
    assert len(regions_of(graph)) == 2


OPERATORS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * y,
    lambda x, y: torch.sub(x, y, alpha=0.3),
    lambda x, y: torch.addcmul(x, y, x, value=0.7),
    lambda x, y: (x - y).relu(),
    lambda x, y: x @ y,
    lambda x, y: x.tanh() / 3,
]


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(0, 20), st.integers(0, 20)), min_size=4, max_size=9))
def test_random_graphs_keep_their_bits(choices: list[tuple[Callable[..., Tensor], int, int]]) -> None:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        values = [*batch, state]
        for operator, i, j in choices:
            values.append(operator(values[i % len(values)], values[j % len(values)]))
        return tuple(values[-3:-1]), values[-1]

    generator = torch.Generator().manual_seed(0)
    state, *batch = (torch.randn(6, 6, generator=generator) for _ in range(3))
    graph = capture(step, state, tuple(batch))
    outputs, new, _ = fused_program(graph, Signature(), may_round=False)(state, tuple(batch))
    expected = step(state, batch)
    assert torch.equal(new, expected[1])
    assert all(map(torch.equal, outputs, expected[0]))
