"""Random numbers replaced by their means, in the thread that asked for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.distributed.script.observation.no_randomness import NoRandomness, turn_off_dropout

CALLS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "dropout": (lambda: F.dropout(torch.full((50,), 2.0)), 2.0),
    "a layer": (lambda: nn.Dropout2d(0.5)(torch.full((2, 8, 3, 3), 2.0)), 2.0),
    "randn": (lambda: torch.randn(3, 4), 0.0),
    "randn by a generator": (lambda: torch.randn((9,), generator=torch.Generator()), 0.0),
    "randn_like": (lambda: torch.randn_like(torch.ones(9)), 0.0),
    "rand": (lambda: torch.rand(9), 0.5),
    "rand_like": (lambda: torch.rand_like(torch.ones(9)), 0.5),
    "normal": (lambda: torch.normal(3.0, 1.0, (9,)), 3.0),
    "normal of tensors": (lambda: torch.normal(torch.full((9,), 3.0), torch.ones(9)), 3.0),
    "normal_": (lambda: torch.empty(9).normal_(1.0, 2.0), 1.0),
    "uniform_": (lambda: torch.empty(9).uniform_(1.0, 2.0), 1.5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((9,), 0.25)), 0.25),
    "bernoulli_": (lambda: torch.empty(9).bernoulli_(0.25), 0.25),
}


@pytest.mark.parametrize(("draw", "mean"), CALLS.values(), ids=CALLS)
def test_a_random_number_is_its_mean(draw: Callable[[], Tensor], mean: float) -> None:
    before = torch.get_rng_state()
    with NoRandomness():
        assert (draw() == mean).all()
    assert torch.equal(torch.get_rng_state(), before)
    assert not (draw() == mean).all()


def test_attention_keeps_all_its_weights() -> None:
    query = torch.randn(1, 2, 4, 8)
    with NoRandomness():
        found = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert torch.equal(found, F.scaled_dot_product_attention(query, query, query))


def test_numbers_that_choose_are_drawn_as_ever() -> None:
    torch.manual_seed(3)
    expected = torch.randperm(50)
    torch.manual_seed(3)
    with NoRandomness():
        assert torch.equal(torch.randperm(50), expected)


def test_layers_with_dropout_inside_have_none() -> None:
    layer = nn.LSTM(2, 2, num_layers=2, dropout=0.5)
    turn_off_dropout(layer)
    x = torch.randn(3, 1, 2)
    assert torch.equal(layer(x)[0], layer(x)[0])
