"""Norms, codes and signs: against plain arithmetic, and in expectation."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.kernels.checks import (
    IMPLEMENTATIONS,
    TYPES,
    Kernels,
    check_unbiased,
    make,
    same_bits,
)
from weft.distributed.codecs import kernels as chosen
from weft.distributed.codecs.kernels import definition, derive_key, packed_size

implementations = pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
types = pytest.mark.parametrize("dtype", TYPES)
KEY = derive_key(5)


@implementations
@types
@pytest.mark.parametrize("block", [3, 8, 64, 1000])
def test_norms_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, block: int) -> None:
    x = make("normal", 200, dtype)
    for start in range(0, 200, block):
        part = x[start : start + block].double()
        l2, largest = (kernels.block_norms(x, block, kind)[start // block] for kind in ("l2", "max"))
        assert float(l2) == pytest.approx(float(part.norm()), rel=1e-7)
        assert float(largest) == float(part.abs().max().float())


@implementations
def test_squares_are_added_in_eight_lanes_and_a_tree(kernels: Kernels) -> None:
    squares = [float(v) ** 2 for v in make("normal", 61, torch.float64)]
    lanes = [0.0] * 8
    for i, square in enumerate(squares):
        lanes[i % 8] += square
    halves = [lanes[j] + lanes[j + 4] for j in range(4)]
    total = (halves[0] + halves[2]) + (halves[1] + halves[3])
    expected = torch.tensor(math.sqrt(total), dtype=torch.float64).float()
    assert kernels.block_norms(make("normal", 61, torch.float64), 61, "l2").equal(expected.view(1))


@implementations
@types
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_what_is_on_the_grid_comes_back(kernels: Kernels, dtype: torch.dtype, bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    x = torch.arange(-top, top + 1, dtype=dtype)
    norms = kernels.block_norms(x, 300, "max")
    codes = kernels.quantise(x, norms, 300, bits, KEY)
    out = torch.full_like(x, 100)
    kernels.dequantise(codes, norms, 300, bits, out)
    assert out.equal(x) and codes.numel() == packed_size(x.numel(), bits)
    kernels.dequantise(codes, norms, 300, bits, out, add=True)
    assert out.equal(2 * x)


@implementations
def test_codes_lie_first_in_the_low_bits(kernels: Kernels) -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0])
    assert kernels.quantise(x, torch.ones(1), 8, 2, KEY).tolist() == [0b01_00_11_01, 0b11]
    assert kernels.quantise(7 * x, torch.tensor([7.0]), 8, 4, KEY).tolist() == [0xF7, 0x70, 0x0F]
    assert kernels.encode_signs(x.clone(), 8)[0].tolist() == [0b01101]


@implementations
@types
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_levels_are_the_two_neighbours(kernels: Kernels, dtype: torch.dtype, bits: int) -> None:
    x = make("normal", 1000, dtype)
    norms = kernels.block_norms(x, 96, "l2")
    out = torch.empty_like(x)
    kernels.dequantise(kernels.quantise(x, norms, 96, bits, KEY), norms, 96, bits, out)
    grid = norms.repeat_interleave(96)[:1000] / (2 ** (bits - 1) - 1)
    assert ((out - x).abs() <= grid * (1 + 1e-5)).all() and (out * x >= 0).all()


@implementations
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_is_unbiased(kernels: Kernels, bits: int) -> None:
    check_unbiased(kernels, make("normal", 2000, torch.float32), 64, bits)


def to_nearest(x: Tensor, norms: Tensor, block: int, bits: int, key: int) -> Tensor:
    top = 2 ** (bits - 1) - 1
    ratios = (x / norms.repeat_interleave(block)[: x.numel()] * top).round().int()
    return definition.pack_bits(ratios.abs() | ((x < 0).int() << (bits - 1)), bits)


def always_down(x: Tensor, norms: Tensor, block: int, bits: int, key: int) -> Tensor:
    return to_nearest(x - 0.25 * x.sign() * norms.repeat_interleave(block)[: x.numel()] / 7, norms, block, bits, key)


def one_draw_for_all(x: Tensor, norms: Tensor, block: int, bits: int, key: int) -> Tensor:
    return definition.quantise(x, norms, block, bits, 0)


@pytest.mark.parametrize("broken", [to_nearest, always_down, one_draw_for_all])
def test_a_biased_rounding_is_found(broken: object) -> None:
    with pytest.raises(AssertionError, match="standard errors"):
        kernels = SimpleNamespace(quantise=broken, dequantise=definition.dequantise)
        check_unbiased(kernels, make("normal", 2000, torch.float32), 64, 4)


@implementations
@types
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["l2", "max"])
def test_a_block_with_a_bad_number_is_decoded_as_none(
    kernels: Kernels, dtype: torch.dtype, bad: float, kind: str
) -> None:
    x = make("normal", 30, dtype)
    x[11] = bad
    norms = kernels.block_norms(x, 10, kind)
    out = torch.zeros_like(x)
    kernels.dequantise(kernels.quantise(x, norms, 10, 4, KEY), norms, 10, 4, out)
    assert out[10:20].isnan().all() and out[:10].isfinite().all() and out[20:].isfinite().all()


@implementations
@types
def test_a_block_of_nothing_stays_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    for x in (torch.zeros(9, dtype=dtype), torch.full((9,), -1e-44, dtype=dtype)):
        norms = kernels.block_norms(x, 4, "max")
        codes = kernels.quantise(x, norms, 4, 4, KEY)
        assert codes.tolist() == [0] * 5
        out = torch.ones_like(x)
        kernels.dequantise(codes, norms, 4, 4, out)
        assert out.abs().max() == 0


@implementations
@types
def test_signs_have_the_means_of_their_sides_and_leave_the_rest(kernels: Kernels, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 3.0, -4.0, 0.0, -0.0, -2.0, -6.0], dtype=dtype)
    kept = x.clone()
    codes, scales = kernels.encode_signs(kept, 4)
    assert codes.tolist() == [0b0011011] and scales[:, 0].tolist() == [pytest.approx(4 / 3), -4.0]
    assert scales[:, 1].tolist() == [0.0, -4.0]
    decoded = torch.empty_like(x)
    kernels.decode_signs(codes, scales, 4, decoded)
    assert same_bits(kept, x - decoded)
    kernels.decode_signs(codes, scales, 4, kept, add=True)
    assert same_bits(kept, (x - decoded) + decoded)


@implementations
def test_symmetric_signs_share_one_mean(kernels: Kernels) -> None:
    kept = torch.tensor([1.0, -3.0, 2.0, 8.0])
    codes, scales = kernels.encode_signs(kept, 3, symmetric=True)
    assert scales.tolist() == [[2.0, 8.0], [-2.0, -8.0]] and kept.tolist() == [-1.0, -1.0, 0.0, 0.0]
    assert codes.tolist() == [0b1101]


@implementations
def test_signs_of_a_bad_number_are_loud(kernels: Kernels) -> None:
    codes, scales = kernels.encode_signs(torch.tensor([1.0, float("nan"), 2.0]), 3)
    out = torch.empty(3)
    kernels.decode_signs(codes, scales, 3, out)
    assert out.isnan().any()


def test_messages_of_the_wrong_size_are_refused() -> None:
    out, norms = torch.zeros(10), torch.ones(2)
    for num_bytes, num_norms in ((4, 2), (6, 2), (5, 1), (5, 3)):
        codes = torch.zeros(num_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="another size"):
            chosen.dequantise(codes, torch.ones(num_norms), 8, 4, out)
    with pytest.raises(ValueError, match="another size"):
        chosen.decode_signs(torch.zeros(2, dtype=torch.uint8), norms, 8, out)
    with pytest.raises(ValueError, match="another size"):
        chosen.decode_signs(torch.zeros(3, dtype=torch.uint8), torch.ones(2, 2), 8, out)
