"""One packing of named tensors: what was packed comes out again, and what travels alone is never copied."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.distributed.codecs import (
    Bucket,
    ExactCodec,
    PackedTensors,
    Piece,
    bucket_by_type,
    bucket_of,
    bucket_pieces,
    decode_packed,
    write,
)
from weft.errors import EncodingError

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
named = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8).map(
    lambda found: {f"t{i}": torch.randn(shape, dtype=torch.float64).to(t) for i, (shape, t) in enumerate(found)}
)


def torch_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@given(tensors=named)
def test_what_was_packed_comes_out_again(tensors: dict[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for bucket in bucket_by_type(tensors):
        message = bucket.pack(tensors, bucket.make_memory(torch_empty))
        assert bucket.accepts(message) and message.nbytes == bucket.num_bytes
        found |= bucket.unpack(message)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].shape == tensor.shape for name, tensor in tensors.items()
    )


@given(tensors=named)
def test_packed_tensors_are_views_of_their_messages(tensors: dict[str, Tensor]) -> None:
    packed = PackedTensors(tensors, torch_empty)
    assert packed.num_bytes == sum(t.nbytes for t in tensors.values())
    for message in packed.messages:
        message.zero_()
    assert not any(tensor.any() for tensor in packed.tensors.values())
    write(packed.tensors, tensors)
    assert all(torch.equal(found, tensors[n]) for n, found in packed.views_of(packed.messages).items())


def test_a_tensor_that_travels_alone_is_itself() -> None:
    tensor = torch.randn(3, 4)
    message = bucket_of({"w": tensor}).pack({"w": tensor})
    assert message is tensor


def test_a_tensor_whose_memory_is_in_another_order_is_sent_in_its_own() -> None:
    tensor = torch.randn(3, 4).t()
    message = bucket_of({"w": tensor}).pack({"w": tensor})
    assert message.is_contiguous() and torch.equal(message, tensor)


def test_pieces_are_buckets_of_their_own() -> None:
    tensors = {"w": torch.arange(6.0).view(2, 3), "b": torch.arange(2.0)}
    buckets = bucket_pieces([Piece("w", 2, 6), Piece("b", 0, 2)], tensors)
    assert [bucket.shapes for bucket in buckets] == [((4,),), ((2,),)]
    assert buckets[0].pack(tensors).tolist() == [2.0, 3.0, 4.0, 5.0]
    assert buckets[1].pack(tensors) is tensors["b"]


@pytest.mark.parametrize("wrong", [torch.zeros(6), torch.zeros(7, dtype=torch.float64), torch.zeros(0)])
def test_a_message_of_another_size_or_type_is_not_accepted(wrong: Tensor) -> None:
    bucket = bucket_of({"w": torch.zeros(2, 2), "b": torch.zeros(3)})
    assert not bucket.accepts(wrong)
    packed = PackedTensors({"w": torch.zeros(2, 2), "b": torch.zeros(3)}, torch_empty)
    for messages in ([wrong], [torch.zeros(7), torch.zeros(7)], []):
        with pytest.raises(EncodingError):
            decode_packed(ExactCodec(), packed, messages)


def test_several_pieces_need_memory() -> None:
    bucket: Bucket = bucket_of({"w": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(AssertionError):
        bucket.pack({"w": torch.zeros(2), "b": torch.zeros(2)})
