"""The mixing matrices of gossip: doubly stochastic, connected, and as near to the mean as their graphs allow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.consistency import GRAPHS, make_mixing
from weft.specs.axes import AXES

sizes = st.integers(2, 70)
graphs = st.sampled_from(sorted(GRAPHS))


@given(graphs, sizes)
def test_rows_and_columns_sum_to_one_and_nothing_is_negative(name: str, size: int) -> None:
    matrix = make_mixing(name, size).matrix()
    ones = torch.ones(size, dtype=torch.float64)
    assert torch.allclose(matrix.sum(0), ones, atol=1e-12) and torch.allclose(matrix.sum(1), ones, atol=1e-12)
    assert matrix.min() >= 0


@given(graphs, sizes)
def test_mixing_again_and_again_leads_to_the_mean(name: str, size: int) -> None:
    mixing = make_mixing(name, size)
    assert mixing.contraction() < 1 - 1e-9
    reached = torch.linalg.matrix_power((mixing.matrix() > 0).double(), size)
    assert (reached > 0).all(), "every rank is heard by every other in the end"


@given(sizes)
def test_all_ranks_have_as_many_neighbours_and_count_none_twice(size: int) -> None:
    for name in GRAPHS:
        mixing = make_mixing(name, size)
        assert {len(sources) for sources in mixing.graph} == {mixing.num_neighbours}
        for rank, sources in enumerate(mixing.graph):
            assert rank not in sources and len(set(sources)) == len(sources)


@pytest.mark.parametrize(
    ("name", "size", "heard_by_5"),
    [
        ("ring", 9, (4, 6)),
        ("torus", 9, (2, 3, 4, 8)),  # 3 x 3: 5 is at the end of the middle row
        ("torus", 8, (1, 4, 6)),  # 2 x 4: above and below are one
        ("torus", 7, (4, 6)),  # a prime number is a ring
        ("exponential", 9, (1, 3, 4, 6)),  # 4, 2, 1 and 8 before
        ("complete", 6, (0, 1, 2, 3, 4)),
    ],
)
def test_graphs_are_what_their_names_say(name: str, size: int, heard_by_5: tuple[int, ...]) -> None:
    assert make_mixing(name, size).graph[5] == heard_by_5


def test_two_ranks_are_one_pair_on_every_graph() -> None:
    # Regression of Deep500: with two ranks the one neighbour was counted as the left and as the right one.
    for name in GRAPHS:
        assert torch.equal(make_mixing(name, 2).matrix(), torch.full((2, 2), 0.5, dtype=torch.float64))


def test_more_neighbours_mix_faster() -> None:
    contraction = {name: make_mixing(name, 64).contraction() for name in GRAPHS}
    assert contraction["complete"] < 1e-12 < contraction["exponential"] < contraction["torus"] < contraction["ring"] < 1


def test_a_plan_knows_these_graphs_and_no_others() -> None:
    assert set(AXES["consistency"]["gossip"].words["graph"]) == set(GRAPHS)
