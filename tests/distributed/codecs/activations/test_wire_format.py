"""Wire formats: a contract for all of them, which tensors they take, and the bytes that the planner knows."""

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs.activations import AbstractWireFormat, empty_message, make_format, pack, unpack
from weft.distributed.codecs.activations.wire_format import LEAST
from weft.planning.activation_cost import activation_bytes
from weft.proving.rounded import step_of
from weft.specs import CPU, parse_plan
from weft.specs.axes import AXES
from weft.specs.plan import Choice

NAMES = tuple(AXES["activations"])


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def sent_and_received(wire_format: AbstractWireFormat, x: Tensor) -> Tensor:
    """The receiver has nothing but the form of the tensor."""
    message = empty_message(wire_format, tuple(x.shape), x.dtype, CPU)
    message.copy_(pack(wire_format, x))
    return unpack(wire_format, message, tuple(x.shape), x.dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_tensor_arrives_in_its_form_and_to_the_error_that_is_stated(name: str, dtype: torch.dtype) -> None:
    x = values(7, 50, 9, dtype=dtype).transpose(0, 1)
    found = sent_and_received(make_format(Choice(name)), x)
    assert found.shape == x.shape and found.dtype == dtype
    step = step_of(parse_plan(f"pipeline=2 activations={name}")) + (2**-8 if dtype is torch.bfloat16 else 0.0)
    error = float((found.double() - x.double()).abs().max() / x.double().abs().max())
    assert error <= step * (1 + 1e-6)
    assert name == "none" or dtype is torch.bfloat16 or error > step / 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, LEAST - 1, LEAST, 2048, 5000])
def test_bytes_are_those_that_the_planner_knows(name: str, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        sent = pack(make_format(Choice(name)), values(size, dtype=dtype))
        assert sent.nbytes == activation_bytes(name, float(size * dtype.itemsize), dtype.itemsize)


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_truth_values_and_small_tensors_travel_as_they_are(name: str) -> None:
    wire_format = make_format(Choice(name))
    exact = [torch.arange(1000), values(1000) > 0, torch.randint(255, (5056,)).to(torch.uint8), values(LEAST - 1)]
    for x in exact:
        assert pack(wire_format, x).dtype == x.dtype
        assert torch.equal(sent_and_received(wire_format, x), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_does_not_become_a_number(name: str, bad: float) -> None:
    x = values(600)
    x[17] = bad
    found = sent_and_received(make_format(Choice(name)), x)
    assert not bool(found[17].isfinite()) and bool(found[:17].isfinite().all() and found[18:].isfinite().all())


def test_what_is_too_large_for_fp16_is_seen() -> None:
    assert bool(sent_and_received(make_format(Choice("fp16")), torch.full((300,), 1e6)).isinf().all())


def test_half_floats_are_not_rounded_again() -> None:
    x = values(600, dtype=torch.float16)
    assert torch.equal(sent_and_received(make_format(Choice("bf16")), x), x)
