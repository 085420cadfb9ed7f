"""Half precision: rounded as the definition says, to the nearest, and nothing that does not fit goes unseen."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.codecs import HalfCodec, bucket_of, make_codec
from weft.errors import EncodingError
from weft.proving.rounding import BF16, FP16, Rounding
from weft.specs import Choice

ROUNDINGS: dict[str, Rounding] = {"fp16": FP16, "bf16": BF16}

floats = st.integers(0, 2**32 - 1).map(lambda bits: struct.unpack("f", struct.pack("I", bits))[0]).filter(math.isfinite)


@pytest.mark.parametrize("name", ROUNDINGS)
@given(value=floats)
def test_it_rounds_as_the_definition_says(name: str, value: float) -> None:
    """The two know nothing of each other: one asks torch for 16 bits, the other counts binary digits."""
    message = torch.tensor([value])
    bucket, codec = bucket_of({"w": message}), make_codec(Choice(name))
    try:
        found = codec.decode(bucket, codec.encode(bucket, message))
    except EncodingError:
        assert abs(float(ROUNDINGS[name](message.double()))) > torch.finfo(codec.encode(bucket, message * 0).dtype).max
    else:
        assert torch.equal(found, ROUNDINGS[name](message))


def test_ties_go_to_the_even_neighbour() -> None:
    bucket = bucket_of({"w": torch.zeros(4)})
    sent = HalfCodec("bf16").encode(bucket, torch.tensor([257.0, 259.0, -257.0, -259.0]))
    assert sent.tolist() == [256.0, 260.0, -256.0, -260.0]


def test_a_definition_that_truncates_is_not_met() -> None:
    values = torch.tensor([1.0 + 2**-8 + 2**-9, 1.0 + 2**-7 - 2**-12])
    bucket = bucket_of({"w": values})
    truncated = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert not torch.equal(BF16(values), truncated)
    assert torch.equal(BF16(values), HalfCodec("bf16").encode(bucket, values).float())


@pytest.mark.parametrize(("name", "largest", "cure"), [("fp16", 65520.0, "bf16"), ("bf16", 3.4e38, "none")])
def test_what_does_not_fit_names_its_tensor_and_the_cure(name: str, largest: float, cure: str) -> None:
    tensors = {"w": torch.ones(3), "b": torch.tensor([0.0, -largest])}
    bucket, codec = bucket_of(tensors), make_codec(Choice(name))
    message = bucket.pack(tensors, torch.empty(5))
    with pytest.raises(EncodingError, match=rf"does not fit into {name} \(b: .*use compress={cure}") as caught:
        codec.encode(bucket, message)
    assert caught.value.name == "b"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_before_is_sent_as_it_is(value: float) -> None:
    """A gradient that diverged is another error's business."""
    message = torch.tensor([1.0, value])
    bucket = bucket_of({"w": message})
    assert not HalfCodec("fp16").encode(bucket, message).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16, torch.bool])
def test_what_has_no_more_than_16_bits_or_is_whole_is_sent_as_it_is(dtype: torch.dtype) -> None:
    message = torch.tensor([1, 0, 1]).to(dtype)
    bucket = bucket_of({"w": message})
    sent = HalfCodec("fp16").encode(bucket, message)
    assert sent.dtype == dtype and torch.equal(sent, message)
