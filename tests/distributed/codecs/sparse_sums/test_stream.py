"""Streams: sums that fill up, parts of the index range, and the wire form."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.codecs.sparse_sums.running import bits, in_rank_order, make_stream
from weft.distributed.codecs.kernels import merge
from weft.distributed.codecs.sparse_sums import HEADER_BYTES, INDEX_TYPE, SparseStream, read_stream, write_stream
from weft.distributed.codecs.sparse_sums.stream import add, add_up, cut, join
from weft.errors import EncodingError

INDICES = st.sets(st.integers(0, 59), max_size=60).map(lambda numbers: torch.tensor(sorted(numbers), dtype=torch.int32))


def sparse(*indices: int, length: int = 20, seed: int = 0) -> SparseStream:
    return make_stream(torch.tensor(indices), length, seed=seed)


@given(INDICES, INDICES)
def test_a_merge_has_all_indices_once_and_the_same_bits_either_way(one: Tensor, other: Tensor) -> None:
    values, other_values = torch.randn(len(one)), torch.randn(len(other))
    indices, sums = merge(one, values, other, other_values)
    assert indices.tolist() == sorted({*one.tolist(), *other.tolist()})
    assert indices.dtype == torch.int32
    swapped_indices, swapped = merge(other, other_values, one, values)
    assert torch.equal(swapped_indices, indices) and bits(swapped) == bits(sums)
    dense = SparseStream(60, values, one).to_dense() + SparseStream(60, other_values, other).to_dense()
    assert torch.equal(SparseStream(60, sums, indices).to_dense(), dense)


@pytest.mark.parametrize(("dtype", "entries"), [(torch.float32, 50), (torch.float64, 67)])
def test_a_sum_is_dense_as_soon_as_that_may_be_smaller(dtype: torch.dtype, entries: int) -> None:
    """Of 100 places: 8 bytes an entry against 4 a place, or 12 against 8."""
    few = make_stream(torch.arange(entries - 1 - 20), 100, dtype)
    more = make_stream(torch.arange(entries - 20), 100, dtype)
    other = make_stream(torch.arange(20), 100, dtype, seed=1)
    assert not add(few, other).is_dense and not add(other, few).is_dense
    assert add(more, other).is_dense and add(other, more).is_dense
    assert torch.equal(add(more, other).values, more.to_dense() + other.to_dense())


def test_a_full_sparse_stream_is_not_taken_for_a_dense_one() -> None:
    full = sparse(*range(20))
    assert not full.is_dense and full.compact().is_dense
    assert torch.equal(full.compact().values, full.to_dense())
    assert not sparse(3).compact().is_dense


def test_sums_leave_their_streams_as_they_are() -> None:
    streams = [sparse(1, 2), sparse(*range(12), seed=1), sparse(*range(4), seed=2).as_dense(), sparse(5, seed=3)]
    before = [stream.values.clone() for stream in streams]
    total = add_up(streams)
    assert total.is_dense and torch.equal(total.values, in_rank_order(streams))
    assert all(torch.equal(stream.values, old) for stream, old in zip(streams, before, strict=True))


@given(INDICES, st.lists(st.integers(0, 60), max_size=6).map(sorted))
def test_parts_joined_are_the_whole(indices: Tensor, cuts: list[int]) -> None:
    whole, bounds = make_stream(indices, 60), [0, *cuts, 60]
    for stream in (whole, whole.as_dense()):
        parts = cut(stream, bounds)
        assert [part.length for part in parts] == [end - begin for begin, end in pairwise(bounds)]
        assert torch.equal(join(parts, bounds).to_dense(), whole.to_dense())


def test_a_part_that_is_full_is_cut_dense_and_makes_the_whole_dense() -> None:
    parts = cut(sparse(0, 1, 2, 3, 17), (0, 4, 20))
    assert [part.is_dense for part in parts] == [True, False]
    assert join(parts, (0, 4, 20)).is_dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entries", [0, 1, 3, 20])
def test_the_wire_form_is_read_back(dtype: torch.dtype, entries: int) -> None:
    stream = make_stream(torch.arange(entries), 20, dtype)
    for sent in (stream, stream.as_dense()):
        message = write_stream(sent)
        assert message.dtype == torch.uint8 and len(message) == HEADER_BYTES + sent.num_bytes
        shifted = torch.cat([torch.zeros(4, dtype=torch.uint8), message])[4:]  # as a part of a larger message
        for received in (message, shifted):
            found = read_stream(received, 20, dtype)
            assert found.is_dense == sent.is_dense and torch.equal(found.to_dense(), stream.to_dense())


def damaged(place: int, number: int) -> Tensor:
    """The message of entries 3, 5 and 9 of 20: form, count, three values, three indices; one of these is another."""
    message = write_stream(sparse(3, 5, 9))
    message.view(torch.int32)[place] = number
    return message


@pytest.mark.parametrize(
    "message",
    [
        damaged(0, 2),
        damaged(0, 1),
        damaged(1, -1),
        damaged(1, 2),
        damaged(1, 4),
        damaged(1, 21),
        damaged(5, -1),
        damaged(6, 3),
        damaged(6, 2),
        damaged(7, 20),
        damaged(0, 0)[:-1],
        damaged(0, 0)[:4],
        damaged(0, 0).view(torch.int32),
    ],
)
def test_what_is_no_stream_is_refused(message: Tensor) -> None:
    with pytest.raises(EncodingError, match="no stream of this vector"):
        read_stream(message, 20, torch.float32)


def test_a_stream_of_another_length_or_type_is_refused() -> None:
    message = write_stream(sparse(3, 5, 19).as_dense())
    assert read_stream(message, 20, torch.float32).is_dense
    for length, dtype in ((19, torch.float32), (20, torch.float64)):
        with pytest.raises(EncodingError):
            read_stream(message, length, dtype)


def test_a_stream_has_a_value_for_each_index() -> None:
    with pytest.raises(AssertionError, match="a value for each"):
        SparseStream(4, torch.zeros(2), torch.zeros(1, dtype=INDEX_TYPE))
    with pytest.raises(AssertionError, match="int32"):
        SparseStream(4, torch.zeros(2), torch.tensor([0, 1]))
