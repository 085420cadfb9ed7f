"""Fused regions that write where they are told."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.graph import PlannedProgram, Program, Signature, capture
from weft.graph.fusion import fuse

SIZE = 50_000  # as large as fusing pays


def descent(state: Any, batch: Any) -> tuple[Any, Any]:
    """Momentum, and the norm of the step beside it."""
    velocity = state["velocity"] * 0.9 + batch
    weight = state["weight"] - 0.1 * velocity
    return {"step": 0.1 * velocity}, {"velocity": velocity, "weight": weight}


def inputs() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    one, other, batch = (torch.randn(SIZE, generator=generator) for _ in range(3))
    return {"velocity": one, "weight": other}, batch


@pytest.mark.slow
def test_a_region_writes_over_the_state_and_returns_the_rest(tmp_path: Path) -> None:
    graph = capture(descent, *inputs())
    fused = fuse(graph)
    program = PlannedProgram(fused, Signature(replaced=("state",)), folder=tmp_path)
    assert "] = region_" in program.source and ".copy_(" not in program.source
    (state, batch), (expected, _) = inputs(), inputs()
    for _ in range(2):
        outputs, state, _ = program(state, batch)
        shown, expected, _ = Program(graph, folder=tmp_path)(expected, batch)
        torch.testing.assert_close((outputs, state), (shown, expected))
