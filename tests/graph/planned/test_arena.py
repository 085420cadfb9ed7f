"""The arena: what is alive at the same time is never in the same place."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from weft.graph.memory_plan.arena import ALIGNMENT, Arena, Span, place_all


def named(spans: list[Span]) -> dict[fx.Node, Span]:
    graph = fx.Graph()
    return {graph.placeholder(f"v{i}"): span for i, span in enumerate(spans)}


def check_apart(spans: dict[fx.Node, Span], offsets: dict[fx.Node, int], size: int) -> None:
    for node, span in spans.items():
        begin, end = offsets[node], offsets[node] + span.num_bytes
        assert begin % ALIGNMENT == 0 and end <= size
        for other, that in spans.items():
            if other is not node and span.first <= that.last and that.first <= span.last:
                assert end <= offsets[other] or offsets[other] + that.num_bytes <= begin


SPANS = st.builds(
    lambda first, length, size: Span(first, first + length, size),
    st.integers(0, 20),
    st.integers(0, 10),
    st.integers(1, 300),
)


@settings(deadline=None, max_examples=100)
@given(st.lists(SPANS, max_size=25))
def test_values_that_are_alive_together_are_apart(given_spans: list[Span]) -> None:
    spans = named(given_spans)
    check_apart(spans, *place_all(spans))


def test_values_one_after_the_other_share_memory() -> None:
    offsets, size = place_all(named([Span(i, i, 64) for i in range(5)]))
    assert set(offsets.values()) == {0} and size == 64


def test_two_holes_side_by_side_are_one() -> None:
    offsets, size = place_all(named([Span(0, 1, 64), Span(0, 1, 64), Span(2, 2, 128)]))
    assert list(offsets.values()) == [0, 64, 0] and size == 128


def test_a_hole_at_the_end_grows() -> None:
    offsets, size = place_all(named([Span(0, 3, 64), Span(0, 0, 64), Span(1, 1, 192)]))
    assert list(offsets.values()) == [0, 64, 64] and size == 256


def test_an_overlap_is_found() -> None:
    spans = named([Span(0, 1, 64), Span(1, 2, 64)])
    with pytest.raises(AssertionError):
        check_apart(spans, dict.fromkeys(spans, 0), 64)


def test_an_arena_is_as_large_as_the_largest_wish() -> None:
    arena = Arena()
    first = arena.reserve(100)
    assert arena.reserve(50) is first
    assert len(arena.reserve(200)) == 200 and arena.memory is not first
