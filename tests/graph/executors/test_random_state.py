"""Random states on the CPU; tests/stand_in has those of a device."""

import pytest
import torch

from weft.graph.executors.random_state import (
    fit_random_state,
    get_random_state,
    seed_random_state,
    set_random_state,
    use_random_state,
)


def test_a_block_draws_from_its_state_and_leaves_the_generator_as_it_was() -> None:
    before = get_random_state()
    with use_random_state(seed_random_state(7)):
        drawn = torch.rand(3)
    assert torch.equal(get_random_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_the_generator_is_put_back_after_an_error_too() -> None:
    before = get_random_state()
    with pytest.raises(KeyError), use_random_state(seed_random_state(7)):
        torch.rand(3)
        raise KeyError
    assert torch.equal(get_random_state(), before)
    set_random_state(before)


def test_a_state_of_another_kind_of_device_is_not_taken() -> None:
    fresh, own = seed_random_state(1), seed_random_state(2)
    assert fit_random_state(own, fresh) is own
    assert fit_random_state(torch.cat([own, own]), fresh) is fresh
