"""Collectives with gradients: each backward is the adjoint of its forward, summed over ranks as its users count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import (
    add_up,
    collect,
    copy,
    gather,
    own_part,
    parts_of,
    scatter,
    span_of,
    spread,
)
from weft.distributed.placement.tensor.vocabulary import cross_entropy_of_parts, embed_parts
from weft.distributed.virtual import run_virtual

SIZE = 5  # uneven parts of 2 and 3 ranks


def on_ranks(program: Callable[[AbstractGroup], Any], size: int = 3) -> list[Any]:
    return list(run_virtual(program, size).results)


def tensor_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient_at(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """What the function gives, and the gradient of x for a gradient of the output with this seed."""
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(tensor_of(seed, *y.shape))
    assert x.grad is not None
    return y.detach(), x.grad


def test_copy_adds_up_gradients() -> None:
    x, parts = tensor_of(0, 4), [tensor_of(10 + rank, 4) for rank in range(3)]
    for y, dx in on_ranks(lambda group: gradient_at(lambda x: copy(x, group), x, 10 + group.rank)):
        assert torch.equal(y, x)
        torch.testing.assert_close(dx, sum(parts))


def test_add_up_hands_gradients_on() -> None:
    parts = [tensor_of(rank, 4) for rank in range(3)]
    for y, dx in on_ranks(lambda group: gradient_at(lambda x: add_up(x, group), parts[group.rank], 10)):
        torch.testing.assert_close(y, sum(parts))
        assert torch.equal(dx, tensor_of(10, 4))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_and_scatter_are_each_others_backward(dim: int) -> None:
    whole, gradient = tensor_of(0, SIZE, SIZE, SIZE), tensor_of(10, SIZE, SIZE, SIZE)

    def program(group: AbstractGroup) -> None:
        own = own_part(whole, group, dim % 3)
        y, dx = gradient_at(lambda x: gather(x, group, dim, SIZE), own, 10)
        assert torch.equal(y, whole) and torch.equal(dx, own_part(gradient, group, dim % 3))
        y, dx = gradient_at(lambda x: scatter(x, group, dim) * 1.0, whole, 20 + group.rank)
        assert torch.equal(y, own)
        lengths = parts_of(SIZE, 3)
        shapes = [[length if d == dim % 3 else SIZE for d in range(3)] for length in lengths]
        assert torch.equal(dx, torch.cat([tensor_of(20 + rank, *shapes[rank]) for rank in range(3)], dim))

    on_ranks(program)


def test_collect_and_spread_add_up_parts() -> None:
    whole = tensor_of(0, 2, SIZE)

    def program(group: AbstractGroup) -> None:
        y, dx = gradient_at(lambda x: collect(x, group, 1, SIZE), own_part(whole, group, 1), 10 + group.rank)
        total = sum(tensor_of(10 + rank, 2, SIZE) for rank in range(3))
        assert torch.equal(y, whole)
        torch.testing.assert_close(dx, own_part(torch.as_tensor(total), group, 1))
        y, dx = gradient_at(lambda x: spread(x, group, 1), tensor_of(group.rank, 2, SIZE), 30)
        begin, length = span_of(SIZE, group.rank, 3)
        summed = torch.as_tensor(sum(tensor_of(rank, 2, SIZE) for rank in range(3)))
        torch.testing.assert_close(y, summed.narrow(1, begin, length))

    on_ranks(program)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_parts_is_that_of_the_whole(smoothing: float, reduction: str) -> None:
    logits, labels = 20 * tensor_of(0, 6, 7), torch.tensor([0, 6, -100, 3, 4, 2])

    def loss_of(x: Tensor, **given: Any) -> Tensor:
        return F.cross_entropy(x, labels, label_smoothing=smoothing, reduction=reduction)

    def program(group: AbstractGroup) -> None:
        expected, gradient = gradient_at(loss_of, logits, 5)
        found, own = gradient_at(
            lambda x: cross_entropy_of_parts(x, labels, group, 7, label_smoothing=smoothing, reduction=reduction),
            own_part(logits, group, 1),
            5,
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own, own_part(gradient, group, 1), rtol=1e-12, atol=1e-12)

    on_ranks(program)


def test_words_of_other_ranks_give_zeros_here_and_padding_gets_no_gradient() -> None:
    weight, words = tensor_of(0, 7, 3), torch.tensor([[0, 6, 2], [3, 3, 4]])

    def program(group: AbstractGroup) -> None:
        expected, gradient = gradient_at(lambda w: F.embedding(words, w, 3), weight, 5)
        found, own = gradient_at(lambda w: embed_parts(words, w, group, 7, 3), own_part(weight, group, 0), 5)
        assert torch.equal(found, expected)
        torch.testing.assert_close(own, own_part(gradient, group, 0))

    on_ranks(program)
