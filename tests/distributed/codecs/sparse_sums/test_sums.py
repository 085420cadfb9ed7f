"""Every sparse sum against a dense one, for every support, and with the faults that it must not have."""

from collections.abc import Generator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.sparse_sums.running import (
    LENGTH,
    SUPPORTS,
    check_same_bits,
    check_sum,
    in_rank_order,
    make_quantiser,
    make_stream,
    make_supports,
    run_reduction,
    run_sum,
)
from weft.distributed.codecs import ReductionWork
from weft.distributed.codecs.sparse_sums import (
    INDEX_TYPE,
    SPARSE_ALGORITHMS,
    Quantiser,
    SparseAlgorithm,
    SparseReduction,
    SparseStream,
    sum_sparse,
)
from weft.distributed.codecs.sparse_sums.direct import exchange_streams, peers_after
from weft.distributed.codecs.sparse_sums.split_gather import collect_parts
from weft.distributed.codecs.sparse_sums.stream import add_into, add_up
from weft.distributed.collectives.moves import part_bounds
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllGather, Call, Send
from weft.distributed.virtual import run_virtual
from weft.errors import EncodingError, UsageError

SIZES = (1, 2, 3, 4, 5, 7, 8)
IN_RANK_ORDER: tuple[SparseAlgorithm, ...] = ("gather", "split_gather", "dense_split_gather")


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
@pytest.mark.parametrize("kind", SUPPORTS)
def test_every_sum_is_that_of_a_dense_all_reduce(by: SparseAlgorithm, kind: str) -> None:
    for size in SIZES:
        for dtype in (torch.float32, torch.float64):
            supports = make_supports(kind, size)
            streams = [make_stream(indices, dtype=dtype, seed=rank) for rank, indices in enumerate(supports)]
            before = [stream.values.clone() for stream in streams]
            check_sum(run_sum(streams, by), in_rank_order(streams))
            assert all(torch.equal(stream.values, old) for stream, old in zip(streams, before, strict=True))


def make_floats(size: int) -> list[SparseStream]:
    """Numbers of many magnitudes, whose sum hangs on the order, at indices that overlap much."""
    streams = []
    for rank, indices in enumerate(make_supports("random", size, 80)):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randn(len(indices), generator=generator) * 10.0 ** torch.randint(
            -4, 5, (len(indices),), generator=generator
        )
        streams.append(SparseStream(80, values, indices.to(INDEX_TYPE)))
    return streams


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_the_same_bits_and_so_has_a_second_run(by: SparseAlgorithm, size: int) -> None:
    first, second = (run_sum(make_floats(size), by) for _ in range(2))
    check_same_bits(first)
    assert torch.equal(first.results[0][0], second.results[0][0])
    torch.testing.assert_close(first.results[0][0], in_rank_order(make_floats(size)), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("by", IN_RANK_ORDER)
@pytest.mark.parametrize("size", SIZES)
def test_owners_add_in_the_order_of_ranks(by: SparseAlgorithm, size: int) -> None:
    check_sum(run_sum(make_floats(size), by), in_rank_order(make_floats(size)))


def test_recursive_doubling_adds_in_the_order_of_its_tree() -> None:
    x = [stream.to_dense() for stream in make_floats(6)]
    check_sum(run_sum(make_floats(6), "recursive_doubling"), ((x[0] + x[1]) + (x[2] + x[3])) + (x[4] + x[5]))


def gather_in_order_of_arrival(rank: int, size: int, stream: SparseStream) -> SparseReduction:
    peers = peers_after(rank, size)
    lengths = dict.fromkeys(peers, stream.length)
    streams = yield from exchange_streams(dict.fromkeys(peers, stream), lengths, stream.values, 0)
    return add_up([stream, *streams.values()])


def test_sums_in_order_of_arrival_are_found() -> None:
    streams = make_floats(4)
    broken = run_reduction(lambda rank, size: gather_in_order_of_arrival(rank, size, streams[rank]), 4)
    with pytest.raises(AssertionError, match="different sums"):
        check_same_bits(broken)


# The dense phase, quantised.


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_quantised_sum_is_near_and_the_same_for_all(num_bits: int, size: int) -> None:
    streams, quantiser = make_floats(size), make_quantiser(num_bits, block=16)
    result = run_sum(streams, "dense_split_gather", quantiser=quantiser)
    check_same_bits(result)
    exact, bounds = in_rank_order(streams), part_bounds(80, size)
    for begin, end in pairwise(bounds):
        part = torch.empty(end - begin)
        quantiser.decode(quantiser.encode(exact[begin:end]), part)
        assert torch.equal(result.results[0][0][begin:end], part)


def keep_exact_part(rank: int, size: int, stream: SparseStream, quantiser: Quantiser) -> SparseReduction:
    """As dense_split_gather, but for the owner, who does not decode its own part."""
    bounds = part_bounds(stream.length, size)
    parts = [torch.zeros(end - begin) for begin, end in pairwise(bounds)]
    for part in (yield from collect_parts(rank, stream, bounds, 0)):
        add_into(parts[rank], part)
    sizes = tuple(quantiser.num_bytes(len(part)) for part in parts)
    gathered = torch.empty(sum(sizes), dtype=torch.uint8)
    yield AllGather(gathered, quantiser.encode(parts[rank]), sizes)
    for source, sent in enumerate(gathered.split(sizes)):
        if source != rank:
            quantiser.decode(sent, parts[source])
    return SparseStream(stream.length, torch.cat(parts))


def test_an_owner_that_keeps_exact_values_is_found() -> None:
    streams, quantiser = make_floats(3), make_quantiser(4)
    broken = run_reduction(lambda rank, size: keep_exact_part(rank, size, streams[rank], quantiser), 3)
    with pytest.raises(AssertionError, match="different sums"):
        check_same_bits(broken)


def test_a_quantiser_without_a_dense_phase_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing is quantised here"):
        sum_sparse(0, 2, make_floats(2)[0], "gather", quantiser=make_quantiser(4))


# Damage on the way, and several sums at once.


def damage(reduction: SparseReduction, tag: int, place: int, number: int) -> SparseReduction:
    """The same reduction, but for one int32 of what it sends."""
    while True:
        try:
            calls = next(reduction)
        except StopIteration as end:
            stream: SparseStream = end.value
            return stream
        for call in calls if isinstance(calls, tuple) else (calls,):
            if isinstance(call, Send) and call.tag == tag:
                call.tensor.view(torch.int32)[place] = number
        yield calls


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
@pytest.mark.parametrize(
    ("tag", "place", "number"),
    [(0, 0, 7), (0, 1, -1), (0, 1, LENGTH + 1), (1, -1, LENGTH), (1, -1, 0)],
    ids=["form", "count below", "count above", "index out of range", "index not ascending"],
)
def test_a_damaged_stream_is_refused(by: SparseAlgorithm, tag: int, place: int, number: int) -> None:
    streams = [make_stream(torch.arange(0, LENGTH, 21)) for _ in range(2)]

    def make(rank: int, size: int) -> SparseReduction:
        reduction = sum_sparse(rank, size, streams[rank], by)
        return damage(reduction, tag, place, number) if rank else reduction

    with pytest.raises(EncodingError, match="no stream of this vector"):
        run_reduction(make, 2)


@pytest.mark.parametrize("by", SPARSE_ALGORITHMS)
def test_sums_under_way_at_once_do_not_mix(by: SparseAlgorithm) -> None:
    def program(group: AbstractGroup) -> list[Tensor]:
        def dense(number: int) -> Generator[Call | tuple[Call, ...], None, Tensor]:
            stream = make_stream(torch.arange(number, LENGTH, 50), seed=number)
            total = yield from sum_sparse(group.rank, group.size, stream, by, tag=number)
            return total.to_dense()

        works = [ReductionWork(group, dense(number)) for number in range(3)]
        return [work.wait() for work in reversed(works)][::-1]

    for totals in run_virtual(program, 4).results:
        for number, total in enumerate(totals):
            own = make_stream(torch.arange(number, LENGTH, 50), seed=number).to_dense()
            assert torch.equal(total, 4 * own)
