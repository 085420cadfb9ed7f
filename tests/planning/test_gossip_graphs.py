"""The split of a graph into those who ask and those who are asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.gossip_graphs import GRAPHS, make_split

sizes = st.integers(2, 70)
names = st.sampled_from(sorted(GRAPHS))


def edges_of(name: str, size: int) -> set[frozenset[int]]:
    hears = [(rank, other) for rank in range(size) for other in GRAPHS[name](rank, size) - {rank}]
    return {frozenset(edge) for edge in hears}


def reachable(partners: tuple[tuple[int, ...], ...]) -> set[int]:
    found, left = {0}, [0]
    while left:
        fresh = set(partners[left.pop()]) - found
        found |= fresh
        left += fresh
    return found


@given(names, sizes)
def test_pairs_have_one_who_asks_and_connect_all_ranks(name: str, size: int) -> None:
    split = make_split(name, size)
    used = {frozenset((rank, other)) for rank, partners in enumerate(split.partners) for other in partners}
    assert all(split.asks[a] != split.asks[b] for a, b in used)
    assert used <= edges_of(name, size)
    assert len(used) >= len(edges_of(name, size)) / 2
    assert reachable(split.partners) == set(range(size))


@pytest.mark.parametrize(("name", "size"), [("ring", 4), ("ring", 64), ("torus", 16), ("torus", 64), ("torus", 8)])
def test_graphs_without_odd_cycles_keep_every_edge(name: str, size: int) -> None:
    split = make_split(name, size)
    assert sum(map(len, split.partners)) == 2 * len(edges_of(name, size))
    assert split.num_asking == size // 2 and max(split.loads()) == 1


def test_the_busiest_is_told() -> None:
    split = make_split("ring", 3)  # 0 and 2 ask, and 1 is all they have
    assert (split.asks, max(split.loads())) == ((True, False, True), 2)
