"""The sampler: global batches, and a state that resumes at the exact sample."""

import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import UsageError
from weft.training.sampling import AbstractOrder, Ordered, Sampler, SamplerState, Shuffled, share

Step = Callable[[SamplerState], tuple[Tensor, SamplerState]]


def run_epoch(step: Step, state: SamplerState, world_size: int) -> tuple[list[int], SamplerState]:
    """What all ranks together take until the epoch ends, and the state after it."""
    taken: list[int] = []
    epoch = state.epoch
    while state.epoch == epoch:
        indices, state = step(state)
        for rank in range(world_size):
            taken += share(indices, rank, world_size).tolist()
    return taken, state


def check_epoch(step: Step, size: int, world_size: int) -> None:
    taken, after = run_epoch(step, SamplerState(), world_size)
    assert sorted(taken) == list(range(size)), "the ranks together do not take every sample once"
    assert after == SamplerState(epoch=1, offset=0)


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_all_ranks_together_take_the_epoch_exactly(size: int, batch_size: int, world_size: int) -> None:
    sampler = Sampler(Shuffled(size, seed=7), min(batch_size, size))
    check_epoch(sampler.next_batch, size, world_size)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_resume_with_another_world_size_takes_the_remaining_samples(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 120))
    batch_size = data.draw(st.integers(1, size))
    before, after = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    sampler = Sampler(Shuffled(size, seed=5), batch_size)
    state, taken = SamplerState(epoch=3), list[int]()
    for _ in range(data.draw(st.integers(0, sampler.num_batches - 1))):
        indices, state = sampler.next_batch(state)
        taken += [int(i) for rank in range(before) for i in share(indices, rank, before)]
    resumed = SamplerState.from_dict(json.loads(json.dumps(state.to_dict())))
    rest, _ = run_epoch(Sampler(Shuffled(size, seed=5), batch_size).next_batch, resumed, after)
    assert taken + rest == Shuffled(size, seed=5).order(3).tolist()


def test_a_resume_with_another_batch_size_loses_nothing() -> None:
    first, state = Sampler(Shuffled(10, 1), batch_size=4).next_batch(SamplerState())
    rest, _ = run_epoch(Sampler(Shuffled(10, 1), batch_size=5).next_batch, state, world_size=2)
    assert first.tolist() + rest == Shuffled(10, 1).order(0).tolist()


def dropping(state: SamplerState) -> tuple[Tensor, SamplerState]:
    """Planted fault: Deep500 left out the last samples when the batch did not divide the data."""
    return Sampler(Ordered(10), batch_size=4, drop_last=True).next_batch(state)


def counting_own_samples(state: SamplerState) -> tuple[Tensor, SamplerState]:
    """Planted fault: the offset counts the samples of one of two ranks, so that half of each batch comes again."""
    indices, after = Sampler(Ordered(10), batch_size=4).next_batch(state)
    return indices, after if after.epoch else SamplerState(0, state.offset + 2)


@pytest.mark.parametrize("broken", [dropping, counting_own_samples])
def test_the_check_catches_planted_faults(broken: Step) -> None:
    with pytest.raises(AssertionError, match="every sample once"):
        check_epoch(broken, size=10, world_size=2)


def test_the_last_batch_is_short_or_left_out() -> None:
    whole, dropped = Sampler(Ordered(10), 4), Sampler(Ordered(10), 4, drop_last=True)
    assert (whole.num_batches, whole.num_samples) == (3, 10)
    assert (dropped.num_batches, dropped.num_samples) == (2, 8)
    assert whole.next_batch(SamplerState(0, 8))[0].tolist() == [8, 9]
    assert dropped.next_batch(SamplerState(0, 4))[1] == SamplerState(1, 0)


def test_the_order_of_an_epoch_is_made_once() -> None:
    asked: list[int] = []

    class Counting(AbstractOrder):
        def __len__(self) -> int:
            return 6

        def order(self, epoch: int) -> Tensor:
            asked.append(epoch)
            return torch.arange(6)

    sampler, state = Sampler(Counting(), 2), SamplerState()
    for _ in range(6):
        _, state = sampler.next_batch(state)
    assert asked == [0, 1] and state == SamplerState(2, 0)


def test_a_state_goes_through_json_unchanged() -> None:
    state = SamplerState(epoch=3, offset=17)
    assert SamplerState.from_dict(json.loads(json.dumps(state.to_dict()))) == state


@pytest.mark.parametrize(
    ("size", "batch_size", "text"),
    [(0, 1, "empty"), (5, 6, "batch_size: 6, samples: 5"), (5, 0, "batch_size: 0"), (5, -1, "batch_size: -1")],
)
def test_impossible_batches_are_refused(size: int, batch_size: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Sampler(Ordered(size), batch_size)


@pytest.mark.parametrize("offset", [-1, 8, 9])
def test_a_state_beyond_the_epoch_is_refused(offset: int) -> None:
    with pytest.raises(UsageError, match=f"offset: {offset}, samples: 8"):
        Sampler(Ordered(9), 4, drop_last=True).next_batch(SamplerState(0, offset))
