"""Every operator of the import table against the node tests of the ONNX project."""

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node as node_cases
import pytest
import torch
from torch import Tensor

from weft.graph.onnx import IMPORTS, from_onnx
from weft.graph.onnx.import_operator import ImportedOperator
from weft.graph.onnx.tensor_types import tensor_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the cases' own arithmetic warns

OTHER_TYPES = re.compile("FLOAT[48]E.*|U?INT[24]|UINT(16|32|64)|STRING|COMPLEX.*")  # torch has none, or no arithmetic
NOT_INFERENCE = re.compile("training_mode|training_dropout")
NOT_MADE = re.compile("with_argmax")  # the places of a pool's largest elements


@cache
def cases() -> dict[str, list[Any]]:
    """The cases of one node, by its operator. Modules of operators that are not in the table are not imported: making
    all cases takes long."""
    folder = Path(node_cases.__file__).parent
    for file in sorted(folder.glob("[a-z]*.py")):
        if not IMPORTS.keys().isdisjoint(re.findall(r'make_node\(\s*"(\w+)"', file.read_text())):
            importlib.import_module(f"{node_cases.__name__}.{file.stem}")
    found: dict[str, list[Any]] = {}
    for case in node_cases._NodeTestCases:
        if len(case.model.graph.node) == 1 and not is_left_out(case):
            found.setdefault(case.model.graph.node[0].op_type, []).append(case)
    return found


def is_left_out(case: Any) -> bool:
    described = [*case.model.graph.input, *case.model.graph.output]
    types = {onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) for value in described}
    named = any(rule.search(case.name) for rule in (NOT_INFERENCE, NOT_MADE))
    return named or any(OTHER_TYPES.fullmatch(kind) for kind in types)


def to_tensor(value: Any) -> Tensor:
    if isinstance(value, onnx.TensorProto):
        return tensor_of(value)
    array = np.array(value)
    return (
        torch.from_numpy(array.astype(np.float32)).bfloat16()
        if array.dtype.name == "bfloat16"
        else torch.from_numpy(array)
    )


def compare(case: Any) -> None:
    for entry in case.model.opset_import:
        entry.version = max(entry.version, 7)  # Not is as it was in version 1, in which its cases are
    module = from_onnx(case.model)
    for inputs, outputs in case.data_sets:
        made = module(*map(to_tensor, inputs))
        found = made if isinstance(made, tuple) else (made,)
        for one, other in zip(found, map(to_tensor, outputs), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), case.name
            torch.testing.assert_close(
                one.detach(), other, rtol=case.rtol, atol=case.atol, equal_nan=True, msg=case.name
            )


@pytest.mark.parametrize("kind", sorted(IMPORTS))
def test_operator_passes_its_node_tests(kind: str) -> None:
    assert cases().get(kind), f"no case for {kind}"
    for case in cases()[kind]:
        compare(case)


def test_few_node_tests_of_onnx_are_left_out() -> None:
    """The rules above must not hide an operator that is wrong."""
    every = [case for case in node_cases._NodeTestCases if cases() and is_of_table(case)]
    assert sum(map(len, cases().values())) > 700
    left = [case.name for case in every if is_left_out(case)]
    assert len([name for name in left if "cast" not in name]) < 60


def is_of_table(case: Any) -> bool:
    nodes = case.model.graph.node
    return len(nodes) == 1 and nodes[0].op_type in IMPORTS and not nodes[0].domain


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(IMPORTS, "Tanh", ImportedOperator(lambda _attributes, x: x))
    yield


@pytest.mark.usefixtures("wrong")
def test_a_wrong_operator_is_found() -> None:
    with pytest.raises(AssertionError):
        compare(cases()["Tanh"][0])
