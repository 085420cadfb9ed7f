"""8-bit types: the nearest value of the table, one scale to a block, the same bits from torch and from C++."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.distributed.codecs.activations import eight_bit
from weft.distributed.codecs.activations.eight_bit import BLOCK, decode, encode, message_length
from weft.distributed.codecs.activations.native import load_library
from weft.distributed.codecs.activations.tables import EightBitType, linear_type, tree_type

TYPES = {"linear": linear_type(), "tree": tree_type()}
both = pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
is_compiled = pytest.mark.skipif(load_library() is None, reason="there is no compiler to compare torch with")


def numbers(size: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * torch.exp(2 * torch.randn(size, generator=generator))


def there_and_back(x: Tensor, kind: EightBitType) -> Tensor:
    return decode(encode(x, kind), x.numel(), kind).view(x.shape)


def check_nearest(x: Tensor, found: Tensor, kind: EightBitType) -> None:
    """By looking at every value of the table, in float64."""
    scale = float(x.abs().max())
    errors = (x.double()[:, None] - scale * kind.values.nan_to_num(torch.inf).double()).abs()
    nearest = errors.min(1).values
    assert bool(((x.double() - found.double()).abs() <= nearest + 1e-6 * scale).all())


def check_unbiased(there_and_back: Callable[[Tensor], Tensor]) -> None:
    """Errors on a fine grid of magnitudes cancel out: their mean is a small part of the largest."""
    x = torch.linspace(0.2, 1.0, BLOCK)  # within one decade, where steps are equal
    x[-1] = 1.0
    errors = there_and_back(x) - x
    assert abs(float(errors.mean())) < 0.02 * float(errors.abs().max())


def test_values_are_those_of_the_definition() -> None:
    tree = tree_type().magnitudes
    assert len(set(tree)) == 128 and max(tree) == 1.0 and sorted(tree)[:3] == pytest.approx([0, 1e-7, 1e-6])
    decades = [sum(10.0**-e * 0.1 <= m * (1 + 1e-9) < 10.0**-e for m in tree) for e in range(7)]
    assert decades == [64 - 1, 32, 16, 8, 4, 2, 1]  # of the first the largest is 1 itself
    assert linear_type().values[[0, 127, 129, 255]].tolist() == pytest.approx([0.0, 1.0, -1.0, -1 / 127])


@both
def test_a_number_becomes_the_nearest_value(kind: EightBitType) -> None:
    for seed in range(3):
        x = numbers(BLOCK, seed)
        check_nearest(x, there_and_back(x, kind), kind)


@both
def test_values_of_the_type_stay_what_they_are(kind: EightBitType) -> None:
    x = kind.values[kind.values.isfinite()] * 3.0
    assert torch.equal(there_and_back(x, kind), x)
    assert torch.equal(there_and_back(there_and_back(numbers(5000), kind), kind), there_and_back(numbers(5000), kind))


@both
def test_rounding_has_no_bias(kind: EightBitType) -> None:
    check_unbiased(lambda x: there_and_back(x, kind))
    assert torch.equal(there_and_back(-numbers(5000), kind), -there_and_back(numbers(5000), kind))


@both
def test_each_block_has_its_own_scale(kind: EightBitType) -> None:
    x = torch.cat([numbers(BLOCK), 1e6 * numbers(BLOCK, 1), torch.zeros(BLOCK), 1e-30 * numbers(7, 2)])
    found = there_and_back(x, kind)
    for own, back in zip(x.split(BLOCK), found.split(BLOCK), strict=True):
        assert torch.equal(back, there_and_back(own, kind))
        assert float((own - back).abs().max()) <= 0.0072 * float(own.abs().max())
    assert not bool(found[2 * BLOCK : 3 * BLOCK].any())


@both
def test_what_is_not_finite_is_seen_and_spares_its_block(kind: EightBitType) -> None:
    x = numbers(3000)
    clean = there_and_back(x, kind)
    at = torch.tensor([3, 700, 2500])
    assert not bool((x[at].abs() == x.abs().max()).any()), "none of them is a scale"
    x[at] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    found = there_and_back(x, kind)
    assert found.isnan().nonzero().flatten().tolist() == at.tolist()
    assert torch.equal(found.nan_to_num(0.0), clean.index_fill(0, at, 0.0))
    assert bool(there_and_back(torch.full((300,), torch.inf), kind).isnan().all())


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floats_are_encoded_as_float32(kind: EightBitType, dtype: torch.dtype) -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    assert torch.equal(encode(x.view(3, 100).t(), kind), encode(x.view(3, 100).t().float().contiguous(), kind))


def test_a_message_is_bytes_and_scales() -> None:
    for size in (0, 1, BLOCK, BLOCK + 1):
        message = encode(numbers(size), tree_type())
        assert message.dtype == torch.uint8 and message.nbytes == message_length(size) == size + 4 * -(-size // BLOCK)


@is_compiled
@both
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3 * BLOCK), st.integers(0, 2**31), st.sampled_from([1.0, 1e-38, 1e30, 1e-42]))
def test_torch_and_the_compiled_form_give_the_same_bits(kind: EightBitType, size: int, seed: int, by: float) -> None:
    x = numbers(size, seed) * by
    if size > 5:
        x[5] = torch.nan
    with pytest.MonkeyPatch.context() as patch:
        message, found = encode(x, kind), there_and_back(x, kind)
        patch.setattr(eight_bit, "load_library", lambda: None)
        assert torch.equal(encode(x, kind), message)
        assert torch.equal(there_and_back(x, kind).view(torch.int32), found.view(torch.int32))


def test_messages_may_begin_at_any_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(3000)
    message = encode(x, tree_type())
    shifted = torch.cat([message[:1], message])[1:]
    assert torch.equal(decode(shifted, 3000, tree_type()), there_and_back(x, tree_type()))
    monkeypatch.setattr(eight_bit, "load_library", lambda: None)
    assert torch.equal(decode(shifted, 3000, tree_type()), there_and_back(x, tree_type()))


# ---- planted faults


def test_a_biased_rounding_is_found() -> None:
    """Towards zero, and away from it."""
    for step in (torch.floor, torch.ceil):
        with pytest.raises(AssertionError):
            check_unbiased(lambda x, step=step: step(x * 127) / 127)  # type: ignore[misc]


def test_a_forgotten_scale_is_found() -> None:
    x = 3.0 * numbers(BLOCK)
    message = encode(x, tree_type())
    message[:4] = torch.ones(1).view(torch.uint8)
    with pytest.raises(AssertionError):
        check_nearest(x, decode(message, BLOCK, tree_type()), tree_type())


def test_a_table_that_is_off_by_one_is_found() -> None:
    x = numbers(BLOCK)
    message = encode(x, linear_type())
    message[4:] += 1
    with pytest.raises(AssertionError):
        check_nearest(x, decode(message, BLOCK, linear_type()), linear_type())
