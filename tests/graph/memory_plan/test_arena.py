"""The arena: what is alive at the same time is never in the same place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from weft.graph.memory_plan.arena import ALIGNMENT, Arena, Lifetime, assign_offsets


def named(lifetimes: list[Lifetime]) -> dict[fx.Node, Lifetime]:
    graph = fx.Graph()
    return {graph.placeholder(f"v{i}"): lifetime for i, lifetime in enumerate(lifetimes)}


def check_apart(lifetimes: dict[fx.Node, Lifetime], offsets: dict[fx.Node, int], size: int) -> None:
    for node, lifetime in lifetimes.items():
        begin, end = offsets[node], offsets[node] + lifetime.num_bytes
        assert begin % ALIGNMENT == 0 and end <= size
        for other, that in lifetimes.items():
            if other is not node and lifetime.first <= that.last and that.first <= lifetime.last:
                assert end <= offsets[other] or offsets[other] + that.num_bytes <= begin


SPANS = st.builds(
    lambda first, length, size: Lifetime(first, first + length, size),
    st.integers(0, 20),
    st.integers(0, 10),
    st.integers(1, 300),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(SPANS, max_size=25))
def test_values_that_are_alive_together_are_apart(given_spans: list[Lifetime]) -> None:
    lifetimes = named(given_spans)
    check_apart(lifetimes, *assign_offsets(lifetimes))


def test_values_one_after_the_other_share_memory() -> None:
    offsets, size = assign_offsets(named([Lifetime(i, i, 64) for i in range(5)]))
    assert set(offsets.values()) == {0} and size == 64


def test_two_holes_side_by_side_are_one() -> None:
    offsets, size = assign_offsets(named([Lifetime(0, 1, 64), Lifetime(0, 1, 64), Lifetime(2, 2, 128)]))
    assert list(offsets.values()) == [0, 64, 0] and size == 128


def test_a_hole_at_the_end_grows() -> None:
    offsets, size = assign_offsets(named([Lifetime(0, 3, 64), Lifetime(0, 0, 64), Lifetime(1, 1, 192)]))
    assert list(offsets.values()) == [0, 64, 64] and size == 256


def test_an_overlap_is_found() -> None:
    lifetimes = named([Lifetime(0, 1, 64), Lifetime(1, 2, 64)])
    with pytest.raises(AssertionError):
        check_apart(lifetimes, dict.fromkeys(lifetimes, 0), 64)


def test_an_arena_is_as_large_as_the_largest_wish() -> None:
    arena = Arena()
    first = arena.reserve(100)
    assert arena.reserve(50) is first
    assert len(arena.reserve(200)) == 200 and arena.memory is not first
