"""Other layouts and shapes of a sample: the same values elsewhere, and sizes of 0 and 1."""

import pytest
import torch

from weft.operators.input_variants import LAYOUTS, as_layout, broadcast_variants, empty_variants, layout_variants


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_not_contiguous(layout: str) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    moved = as_layout(x, layout)
    assert moved is not None and moved.shape == x.shape and not moved.is_contiguous()
    assert torch.equal(moved, x[:1].expand_as(x) if layout == "expanded" else x)


def test_layouts_that_a_tensor_cannot_have_are_none() -> None:
    assert [as_layout(torch.tensor(1.0), layout) for layout in LAYOUTS] == [None] * 3
    assert as_layout(torch.ones(3), "transposed") is None
    assert as_layout(torch.ones(1, 3), "expanded") is None


def test_layout_variants_change_one_input_at_a_time() -> None:
    inputs = (torch.randn(2, 3), 5, torch.randn(3))
    for variant in [*layout_variants(inputs), *broadcast_variants(inputs)]:
        assert sum(new is not old for new, old in zip(variant.inputs, inputs, strict=True)) == 1


def shapes(variants) -> list[list[tuple[int, ...]]]:  # type: ignore[no-untyped-def]
    return [[tuple(v.shape) for v in variant.inputs] for variant in variants]


def test_empty_shapes() -> None:
    found = shapes(empty_variants((torch.ones(2, 3), torch.ones(3))))
    assert found == [[(0, 3), (3,)], [(2, 0), (0,)], [(0, 3), (3,)], [(2, 0), (3,)], [(2, 3), (0,)]]


def test_broadcast_shapes() -> None:
    found = shapes(broadcast_variants((torch.ones(2, 3), torch.ones(1, 3))))
    assert found == [[(1, 3), (1, 3)], [(2, 1), (1, 3)], [(3,), (1, 3)], [(2, 3), (1, 1)], [(2, 3), (3,)]]
