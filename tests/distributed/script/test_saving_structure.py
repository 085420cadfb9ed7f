"""Values taken apart into JSON and tensors, and put together again."""

import json
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.distributed.script.saving.parts import digest_of, from_bytes, to_bytes
from weft.distributed.script.saving.structure import put_together, take_apart, tensor_names
from weft.errors import CorruptFileError, UsageError
from weft.records.strict_json import decode_json, encode_json


def through_files(value: Any) -> Any:
    """Taken apart, its structure written as JSON and read, put together."""
    taken = take_apart("part", value)
    structure = decode_json(json.loads(json.dumps(encode_json(taken.structure), allow_nan=False)))
    assert sorted(tensor_names(structure)) == sorted(taken.tensors)
    return put_together(structure, taken.tensors.__getitem__)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["$tensor", "$tuple", "$items", "a"]), inner)
        | st.frozensets(st.integers())
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=40)
@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    found = through_files(value)
    assert found == value and repr(found) == repr(value)


def test_tensors_come_back_under_names_of_their_own() -> None:
    value = {"a": {1: torch.ones(2), "1": torch.zeros(3)}, "a/1": torch.tensor(7), "b": [torch.tensor(True)]}
    found = through_files(value)
    assert [found["a"][1].tolist(), found["a"]["1"].tolist()] == [[1, 1], [0, 0, 0]]
    assert found["a/1"] == 7 and found["b"][0].dtype == torch.bool


def test_other_things_that_states_hold_come_back() -> None:
    value = {"c": Counter({3: 1}), "n": np.float64(0.5), "i": np.int32(4), "a": np.arange(3), "d": torch.float16}
    found = through_files({**value, "v": torch.device("cpu"), "s": {1}, "inf": float("inf"), "t": "inf"})
    assert found["c"] == Counter({3: 1}) and isinstance(found["c"], Counter)
    assert (found["n"], found["i"], found["d"], found["s"]) == (0.5, 4, torch.float16, {1})
    assert isinstance(found["a"], np.ndarray) and found["a"].tolist() == [0, 1, 2]
    assert (found["inf"], found["t"], found["v"]) == (float("inf"), "inf", torch.device("cpu"))


Pair = namedtuple("Pair", "a b")
STRANGE = {
    "function": len,
    "object": object(),
    "named tuple": Pair(1, 2),
    "array of objects": np.array([object()]),
    "sparse": torch.eye(2).to_sparse(),
    "complex": torch.zeros(1, dtype=torch.complex128),
    "generator": torch.Generator(),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_cannot_be_written_is_named(kind: str) -> None:
    with pytest.raises(UsageError, match=r"nothing is pickled \(part\['fns'\]\[1\]: \w+"):
        take_apart("part", {"fns": [0, STRANGE[kind]]})


def test_bytes_hold_all_of_a_value_and_tell_values_apart() -> None:
    weight = torch.ones(2)
    value = {"w": weight, "tied": weight, "n": float("inf")}
    taken = from_bytes(to_bytes(take_apart("part", value)))
    assert put_together(taken.structure, taken.tensors.__getitem__)["tied"].tolist() == [1, 1]
    others = [{**value, "n": 1}, {**value, "w": torch.ones(2, 1)}, {**value, "w": torch.ones(2).double()}]
    digests = {digest_of(take_apart("part", one)) for one in (value, *others)}
    assert len(digests) == 4 and digest_of(take_apart("part", dict(value))) in digests


@pytest.mark.parametrize("structure", [{"$strange": 1}, {"$dtype": "load"}, {"$items": [1]}, {"$tensor": "absent"}])
def test_a_structure_that_is_none_is_damage(structure: Any) -> None:
    with pytest.raises(CorruptFileError, match="unknown kind"):
        put_together(structure, dict[str, torch.Tensor]().__getitem__)
