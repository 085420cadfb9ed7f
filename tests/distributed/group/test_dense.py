"""Dense forms of tensors, and reductions in rank order."""

import pytest
import torch

from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.dense import as_bytes, combine_neighbours, copy_back, make_dense, reduce_parts


def test_a_contiguous_tensor_is_its_own_dense_form() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    dense = make_dense(tensor)
    dense[0] = 9
    assert tensor[0, 0] == 9
    copy_back(tensor, dense)


def test_a_strided_tensor_gets_its_values_back() -> None:
    tensor = torch.zeros(3, 2).T
    dense = make_dense(tensor)
    dense.copy_(torch.arange(6.0))
    assert tensor.sum() == 0
    copy_back(tensor, dense)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_every_type_can_be_seen_as_bytes() -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.int64):
        assert as_bytes(make_dense(torch.zeros((), dtype=dtype))).numel() == dtype.itemsize


@pytest.mark.parametrize(("op", "result"), [("sum", 9), ("min", 1), ("max", 6), ("product", 12), ("mean", 3)])
def test_parts_are_reduced(op: ReduceOp, result: float) -> None:
    parts = torch.tensor([[2.0], [1.0], [6.0]])
    assert reduce_parts(parts, op).tolist() == [result]
    assert parts.tolist() == [[2.0], [1.0], [6.0]]


def test_parts_are_added_in_order() -> None:
    assert reduce_parts(torch.tensor([[1e8], [-1e8], [1.0]]), "sum").item() == 1.0
    assert reduce_parts(torch.tensor([[1.0], [1e8], [-1e8]]), "sum").item() == 0.0


def test_16_bit_floats_are_rounded_once() -> None:
    parts = torch.full((3, 1), 1.0, dtype=torch.bfloat16)
    parts[0] = 256.0  # 257 has no bfloat16: rounding after each step would stay at 256
    assert reduce_parts(parts, "sum").item() == 258.0


def test_neighbours_are_weighted() -> None:
    own = torch.tensor([1.0, 2.0])
    combine_neighbours(own, torch.tensor([[10.0, 10.0], [4.0, 8.0]]), (0.5, 0.1, 0.25))
    assert own.tolist() == [2.5, 4.0]
