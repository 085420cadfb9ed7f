"""Bytes of activations by their format: every row has a formula, and no format sends more than the tensor itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.planning.activation_cost import activation_bytes, is_added_by_group
from weft.planning.placement_cost import pipeline_cost, tensor_cost
from weft.specs.axes import AXES
from weft.specs.plan import Choice

NAMES = tuple(AXES["activations"])


@given(st.sampled_from(NAMES), st.integers(0, 10**7), st.sampled_from([2, 4, 8]))
def test_no_format_makes_a_tensor_larger(name: str, size: int, element_bytes: int) -> None:
    exact = float(size * element_bytes)
    found = activation_bytes(name, exact, element_bytes)
    assert found <= exact and (name != "none" or found == exact) and (size >= 256 or found == exact)


def test_formats_in_the_order_of_their_bytes() -> None:
    assert [activation_bytes(name, 4.0 * 10**6) / 10**6 for name in NAMES] == pytest.approx([4, 2, 2, 1, 1], rel=2e-3)
    assert activation_bytes(Choice("bf16"), 4096.0) == activation_bytes("bf16", 4096.0) == 2048.0


def test_bytes_are_no_sums_and_halves_are() -> None:
    assert [is_added_by_group(name) for name in NAMES] == [True, True, True, False, False]


@pytest.mark.parametrize(("num_ranks", "share"), [(2, 1.0), (3, 4 / 3), (8, 2 * 7 / 8)])
def test_of_two_ranks_whole_messages_are_gathered_of_more_parts(num_ranks: int, share: float) -> None:
    message = activation_bytes("tree8", 4.0 * 10**6)
    found = tensor_cost(num_ranks, 4.0 * 10**6, activations="tree8").bytes_sent
    assert found == pytest.approx(2 * share * message)
    assert found <= tensor_cost(num_ranks, 4.0 * 10**6).bytes_sent / 3.9


def test_a_gather_would_send_more_than_parts_do_where_there_are_more_than_two_ranks() -> None:
    """Why it is for two alone."""
    message = activation_bytes("tree8", 4.0 * 10**6)
    for num_ranks in (3, 4, 8):
        assert tensor_cost(num_ranks, 4.0 * 10**6, activations="tree8").bytes_sent / 2 < (num_ranks - 1) * message


def test_a_stage_sends_a_quarter() -> None:
    exact = pipeline_cost(8, 4.0 * 2048, 4.0 * 4096).bytes_sent
    coded = pipeline_cost(8, 4.0 * 2048, 4.0 * 4096, activations="linear8").bytes_sent
    assert coded == 8 * (2048 + 4 + 4096 + 8) < exact / 3.9
