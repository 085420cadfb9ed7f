"""Random steps that are hard on a memory plan: views, values read late, state that changes places."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["SHAPE", "Recipe", "inputs", "recipes", "step_of"]

SHAPE = (4, 4)
NUM_STATE, NUM_BATCH = 3, 2

BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add,
    torch.mm,
    torch.mul,
    torch.maximum,
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.cat([x[:2], y[2:]]),
    lambda x, y: torch.addmm(x, x, y),
    lambda x, y: x + y.t(),
)
UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    torch.t,
    torch.clone,
    torch.tanh,
    lambda x: x.reshape(2, 8).view(*SHAPE),
    lambda x: x.sum(0, keepdim=True).expand(*SHAPE),
    lambda x: torch.nn.functional.pad(x[:3], (0, 0, 0, 1)),
    lambda x: torch.nn.functional.layer_norm(x, (4,)),
    lambda x: torch.softmax(x, 1),
    lambda x: x.permute(1, 0).contiguous(),
)

Recipe = tuple[list[tuple[int, int, int]], list[int], list[int]]
"""Calls (function, operands), and which values the state becomes and the outputs are."""

_VALUES = st.integers(0, 40)
recipes: st.SearchStrategy[Recipe] = st.tuples(
    st.lists(st.tuples(st.integers(0, len(BINARY) + len(UNARY) - 1), _VALUES, _VALUES), min_size=1, max_size=14),
    st.lists(_VALUES, min_size=NUM_STATE, max_size=NUM_STATE),
    st.lists(_VALUES, min_size=1, max_size=3),
)


def step_of(recipe: Recipe) -> Callable[[Any, Any], tuple[Any, Any]]:
    calls, becomes, shown = recipe

    def step(state: list[Tensor], batch: list[Tensor]) -> tuple[Any, Any]:
        values = [*state, *batch]
        for function, one, other in calls:
            x, y = values[one % len(values)], values[other % len(values)]
            made = BINARY[function](x, y) if function < len(BINARY) else UNARY[function - len(BINARY)](x)
            values.append(made.clamp(-4, 4) if function == 1 else made)
        new_state = [values[place % len(values)] for place in becomes]
        return [values[place % len(values)] for place in shown], new_state

    return step


def inputs(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(SHAPE, generator=generator) for _ in range(NUM_STATE + NUM_BATCH)]
    return drawn[:NUM_STATE], drawn[NUM_STATE:]
