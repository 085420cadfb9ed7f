"""Activations between layouts, against one tensor that has everything; gradients, against autograd of that."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.linear.moves import Deal, Layout, move
from weft.distributed.virtual import run_virtual

ROWS, COLUMNS = (2, 0, 3), (1, 4, 2)  # unequal: the second rank has no samples
MOVES = [("own", "whole"), ("part", "whole"), ("own", "part"), ("part", "own"), ("sum", "own"), ("sum", "part")]


def whole_of(rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(ROWS), sum(COLUMNS), generator=generator, dtype=torch.float64)


def held(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    begin = {"own": sum(ROWS[:rank]), "part": sum(COLUMNS[:rank])}
    if layout == "own":
        return tensor.narrow(0, begin["own"], ROWS[rank]).clone()
    return tensor.narrow(1, begin["part"], COLUMNS[rank]).clone() if layout == "part" else tensor.clone()


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_every_rank_gets_its_values_and_gradients_go_back(source: Layout, target: Layout) -> None:
    def program(group: AbstractGroup) -> Any:
        begin = whole_of(group.rank) if source == "sum" else whole_of()
        tensor = held(begin, source, group.rank).requires_grad_()
        moved = move(tensor, Deal(group, ROWS, COLUMNS), source, target)
        moved.backward(held(whole_of(10 + group.rank), target, group.rank))
        return moved.detach(), tensor.grad

    total = sum(whole_of(rank) for rank in range(3)) if source == "sum" else whole_of()
    gradients = [whole_of(10 + rank) for rank in range(3)]
    if target == "whole":  # all ranks have used it
        back = sum(gradients[1:], gradients[0])
    elif target == "own":
        back = torch.cat([held(gradient, "own", rank) for rank, gradient in enumerate(gradients)])
    else:
        back = torch.cat([held(gradient, "part", rank) for rank, gradient in enumerate(gradients)], dim=1)
    for rank, (moved, gradient) in enumerate(run_virtual(program, 3).results):
        torch.testing.assert_close(moved, held(torch.as_tensor(total), target, rank))
        torch.testing.assert_close(gradient, held(back, source, rank))


def test_all_moves_are_there() -> None:
    layouts: list[Layout] = ["own", "part", "whole", "sum"]
    known = set(itertools.product(layouts[:2], layouts[:3])) | set(itertools.product(["sum"], layouts[:2]))
    assert {pair for pair in known if pair[0] != pair[1]} == set(MOVES)
