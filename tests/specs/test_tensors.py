"""Batches: what is converted, and how they are cut."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.specs import Batch, TaskSpec, TensorSpec


def batch_of(size: int) -> Batch:
    return Batch((torch.arange(size * 2.0).reshape(size, 2),), (torch.arange(size),))


def test_specs_are_hashable_and_equal_by_value() -> None:
    assert len({TensorSpec((8, 8)), TensorSpec((8, 8), torch.float32), TensorSpec((64,))}) == 2
    assert TaskSpec(TensorSpec((8,)), 10) == TaskSpec(TensorSpec((8,)), 10)


def test_only_floating_point_tensors_change_type() -> None:
    batch = batch_of(4).to(dtype=torch.float64)
    assert batch.inputs[0].dtype == torch.float64
    assert batch.targets[0].dtype == torch.int64


def test_conversion_leaves_the_original_alone() -> None:
    batch = batch_of(4)
    batch.to(dtype=torch.float64)
    assert batch.inputs[0].dtype == torch.float32


def test_a_device_is_a_place_for_all_tensors() -> None:
    batch = batch_of(4).to(device=torch.device("meta"))
    assert {t.device.type for t in (*batch.inputs, *batch.targets)} == {"meta"}
    assert batch.inputs[0].dtype == torch.float32


@given(size=st.integers(1, 40), num_parts=st.integers(1, 50))
def test_pieces_are_even_and_make_up_the_whole(size: int, num_parts: int) -> None:
    pieces = batch_of(size).split(num_parts)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == min(size, num_parts)
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([piece.inputs[0] for piece in pieces]), batch_of(size).inputs[0])
    assert torch.equal(torch.cat([piece.targets[0] for piece in pieces]), batch_of(size).targets[0])


def test_inputs_and_targets_are_cut_at_the_same_places() -> None:
    x = torch.arange(7)
    for piece in Batch((x, x * 2), (x * 3,)).split(3):
        assert torch.equal(piece.inputs[0] * 2, piece.inputs[1])
        assert torch.equal(piece.inputs[0] * 3, piece.targets[0])


def test_a_batch_without_targets_can_be_cut() -> None:
    # Zipping the pieces of the inputs with the pieces of no target at all once raised a ValueError.
    pieces = Batch((torch.ones(4, 2),), ()).split(2)
    assert [(len(piece), piece.targets) for piece in pieces] == [(2, ()), (2, ())]
