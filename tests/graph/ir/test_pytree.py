"""Nested values as trees and leaves."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import GraphError
from weft.graph.ir.pytree import flatten, flatten_as, paths_of, relabel, unflatten

leaves = st.builds(lambda: torch.zeros(1)) | st.none() | st.integers() | st.text(max_size=3) | st.booleans()
nested = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@given(nested)
def test_flattened_and_filled_is_the_same(value: Any) -> None:
    tensors, tree = flatten(value)
    assert same(unflatten(tree, tensors), value)
    assert all(a is b for a, b in zip(flatten_as(tree, value, len(tensors)), tensors, strict=True))
    assert sorted(leaf for _, leaf in paths_of(tree)) == list(range(len(tensors)))
    assert relabel(tree, dict(paths_of(tree))) == tree


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one is other or (not isinstance(one, torch.Tensor) and one == other)


def test_a_tensor_at_two_places_is_one_leaf() -> None:
    weight = torch.ones(1)
    tensors, tree = flatten([weight, {"b": weight}])
    assert len(tensors) == 1
    assert list(paths_of(tree)) == [("0", 0), ("1.b", 0)]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([torch.ones(1)], "wanted: 2 items"),
        ([torch.ones(1), 4], "was 3 when captured"),
        ([torch.ones(1), True], "was 3 when captured"),
        ([None, 3], "a tensor is wanted"),
        ({"a": 1}, "wanted: 2 items"),
    ],
)
def test_a_value_of_another_form_is_refused(value: Any, fault: str) -> None:
    _, tree = flatten([torch.ones(1), 3])
    with pytest.raises(GraphError, match=fault):
        flatten_as(tree, value, 1)


def test_what_is_neither_tensor_nor_container_is_refused() -> None:
    with pytest.raises(GraphError, match=r"at: \.a, type: object"):
        flatten({"a": object()})
