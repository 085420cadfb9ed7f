"""Machine code against its definition in torch: every kernel, to the last bit."""

import platform
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from tests.distributed.codecs.kernels.checks import KINDS, SIZES, TYPES, Kernels, make, same_bits
from weft.distributed.codecs import kernels as chosen
from weft.distributed.codecs.kernels import definition, derive_key, native
from weft.distributed.codecs.kernels import random as in_torch

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no compiler")

BLOCKS = [1, 3, 8, 64, 1000, 10**6]
Results = Iterator[tuple[str, Tensor]]


def check_same(kernels: Kernels, x: Tensor, y: Tensor, block: int) -> None:
    """All that kernels make of two tensors is what their definitions make of them."""
    for run in (run_updates, run_sparse, run_codes, run_signs):
        for (name, ours), (_, theirs) in zip(run(kernels, x, y, block), run(definition, x, y, block), strict=True):
            assert same_bits(ours, theirs), f"{name} differs (elements: {x.numel()}, block: {block})"


def run_updates(kernels: Kernels, x: Tensor, y: Tensor, block: int) -> Results:
    kept, velocity = x.clone(), y.flip(0).contiguous()
    kernels.add(kept, y, 0.1)
    yield "add", kept.clone()
    for nesterov in (False, True):
        kernels.add_momentum(velocity, kept, y, 0.1, 0.9, nesterov)
        yield "add_momentum", torch.cat((kept, velocity))
        for num in {0, x.numel() // 50, x.numel() // 2, x.numel()}:
            more = {"velocity": velocity, "momentum": 0.9, "nesterov": nesterov}
            yield "add_and_select", kernels.add_and_select(kept, y, 0.01, num, **more)
            yield "add_and_select, kept", torch.cat((kept, velocity))
            yield "add_and_select, message", kernels.add_and_select(kept, y, 0.01, num)
        for threshold in (0.0, 0.1, 1.0, float("inf")):
            yield "add_and_select_above", kernels.add_and_select_above(kept, y, 0.01, threshold, **more)
            yield "add_and_select_above, message", kernels.add_and_select_above(kept, y, 0.01, threshold)
    yield "kept", kept


def run_sparse(kernels: Kernels, x: Tensor, y: Tensor, block: int) -> Results:
    kept, velocity = x.clone(), y.clone()
    a = kernels.add_and_select(kept, None, 1.0, x.numel() // 3)
    b = kernels.add_and_select(velocity, None, 1.0, x.numel() // 2)
    values_a, values_b = kernels.take(kept, a, velocity), kernels.take(velocity, b)
    yield "take", torch.cat((values_a, values_b, kept, velocity))
    indices, values = kernels.merge(a, values_a, b, values_b)
    yield "merge, places", indices
    yield "merge, values", values
    kernels.scatter_add(kept, indices, values)
    yield "scatter_add", kept


def run_codes(kernels: Kernels, x: Tensor, y: Tensor, block: int) -> Results:
    for kind, bits in product(("l2", "max"), (2, 4, 8)):
        norms = kernels.block_norms(x, block, kind)
        yield f"block_norms {kind}", norms
        codes = kernels.quantise(x, norms, block, bits, derive_key(bits))
        yield f"quantise {bits}", codes
        out = y.clone()
        kernels.dequantise(codes, norms, block, bits, out)
        yield f"dequantise {bits}", out.clone()
        kernels.dequantise(codes, norms, block, bits, out, add=True)
        yield f"dequantise {bits}, added", out


def run_signs(kernels: Kernels, x: Tensor, y: Tensor, block: int) -> Results:
    for symmetric in (False, True):
        kept, out = x.clone(), y.clone()
        codes, scales = kernels.encode_signs(kept, block, symmetric)
        yield "encode_signs, codes", codes
        yield "encode_signs, scales", scales
        yield "encode_signs, kept", kept
        kernels.decode_signs(codes, scales, block, out)
        yield "decode_signs", out.clone()
        kernels.decode_signs(codes, scales, block, out, add=True)
        yield "decode_signs, added", out


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_machine_code_has_the_bits_of_its_definition(kind: str, dtype: torch.dtype) -> None:
    for size, block in product(SIZES, BLOCKS):
        check_same(native, make(kind, size, dtype, 1), make(kind, size, dtype, 2), block)


@given(
    size=st.integers(0, 300),
    block=st.integers(1, 320),
    dtype=st.sampled_from(TYPES),
    data=st.data(),
)
def test_any_numbers_give_the_same_bits(size: int, block: int, dtype: torch.dtype, data: DataObject) -> None:
    numbers = st.floats(width=32) if dtype == torch.float32 else st.floats(width=64)
    few = data.draw(st.lists(numbers, min_size=1, max_size=20))
    places = (in_torch.mix(torch.arange(size), derive_key(size)) % len(few)).long()
    x = torch.tensor(few, dtype=dtype)[places]
    check_same(native, x, x.flip(0).contiguous(), block)


def test_large_tensors_have_the_same_bits() -> None:
    """Large enough for a sample to set the bound."""
    x, y = make("normal", 300_001, torch.float32, 1), make("normal", 300_001, torch.float32, 2)
    check_same(native, x, y, 512)


def faulty(name: str) -> SimpleNamespace:
    """The compiled kernels, one of which is off by one bit in one element."""
    right = getattr(native, name)

    def wrong(*args: object, **kwargs: object) -> object:
        result = right(*args, **kwargs)
        for one in result if isinstance(result, tuple) else (result, args[0], args[1]):
            if isinstance(one, Tensor) and one.numel() and one.element_size() == 4:
                one.view(torch.int32)[-1] ^= 1
                break
        return result

    return SimpleNamespace(**{**vars(native), name: wrong})


@pytest.mark.parametrize(
    "name",
    ["add", "add_momentum", "add_and_select_above", "take", "merge", "scatter_add", "block_norms", "encode_signs"],
)
def test_one_wrong_bit_is_found(name: str) -> None:
    with pytest.raises(AssertionError, match="differs"):
        check_same(faulty(name), make("normal", 200, torch.float32, 1), make("normal", 200, torch.float32, 2), 64)


def test_the_generator_has_the_same_bits() -> None:
    for key in (0, 1, derive_key(1), 2**64 - 1):
        assert native.uniform(key, 5000).equal(in_torch.uniform(key, 5000))
        assert chosen.uniform(key, 77).equal(in_torch.uniform(key, 77))


def test_streams_are_checked_alike() -> None:
    for places in ([], [0], [-1], [0, 1], [1, 1], [2, 1], [5, 2**31 - 1], [-5, 3], list(range(100)), [3] * 70):
        indices = torch.tensor(places, dtype=torch.int32)
        assert native.are_ascending(indices) == definition.are_ascending(indices)
        for num in (0, 1, 6, 2**31 - 1):
            assert native.are_within(indices, num) == definition.are_within(indices, num)


def test_what_does_not_lie_in_one_piece_is_done_in_torch() -> None:
    kept, message = make("normal", 200, torch.float32), make("normal", 100, torch.float32, 1)
    expected = kept[::2].contiguous()
    places = chosen.add_and_select(expected, message, 0.5, 10)
    assert chosen.add_and_select(kept[::2], message, 0.5, 10).equal(places)
    assert same_bits(kept[::2].contiguous(), expected) and kept[1::2].equal(make("normal", 200, torch.float32)[1::2])


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """The library is looked for anew, in the test and after it."""
    forget()
    yield
    forget()


def forget() -> None:
    native.load_library.cache_clear()
    native.is_available.cache_clear()


def test_without_a_compiler_the_definition_is_used_and_said(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_NO_COMPILER", "1")
    x = make("normal", 50, torch.float32)
    with pytest.warns(UserWarning, match="compressed in torch"):
        norms = chosen.block_norms(x, 8, "l2")
    assert norms.equal(definition.block_norms(x, 8, "l2"))
    assert chosen.uniform(3, 5).equal(in_torch.uniform(3, 5))  # and it is said once


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no other processor has these vectors")
def test_processors_without_wide_vectors_give_the_same_bits(
    fresh_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "KERNEL_FLAGS", (*native.KERNEL_FLAGS, "-mno-avx512f"))
    for kind, dtype in product(KINDS, TYPES):
        check_same(native, make(kind, 5000, dtype, 1), make(kind, 5000, dtype, 2), 64)
    test_large_tensors_have_the_same_bits()
