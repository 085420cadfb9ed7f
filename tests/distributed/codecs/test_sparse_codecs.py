"""Sums of selected numbers: by every algorithm the same total, and of those in the order of ranks the same bits."""

from functools import partial

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs import ReductionWork, bucket_of
from weft.distributed.codecs.auto import AutoCodec, forecast_coded, forecast_dense
from weft.distributed.codecs.sparse import SparseSum, Word
from weft.distributed.codecs.topk import TopkCodec
from weft.distributed.collectives import AlgorithmChoice
from weft.distributed.group import AbstractGroup
from weft.distributed.virtual import run_virtual
from weft.planning.cluster import Link
from weft.planning.codec_cost import codec_cost

BUCKET = bucket_of({"w": torch.zeros(40, 50)})


def total_of(group: AbstractGroup, total: SparseSum) -> Tensor:
    codec = TopkCodec(0.05, total=total, rank=group.rank)
    message = torch.randn(BUCKET.num_elements, generator=torch.Generator().manual_seed(group.rank))
    sent = codec.encode(BUCKET, message)
    return ReductionWork(group, codec.reduce(BUCKET, sent, group, out=message)).wait()


def sum_by(by: Word, bits: int = 0, size: int = 5) -> list[Tensor]:
    program = partial(total_of, total=SparseSum(by, bits))
    return list(run_virtual(program, size, choice=AlgorithmChoice("direct")).results)


@pytest.mark.parametrize("by", ["auto", "split", "dense"])
def test_sums_in_the_order_of_ranks_have_the_same_bits(by: Word) -> None:
    expected = sum_by("gather")[0]
    assert all(torch.equal(found, expected) for found in sum_by(by))


@pytest.mark.parametrize("by", ["doubling", "fastest"])
def test_other_sums_differ_by_rounding_alone_and_not_between_ranks(by: Word) -> None:
    found = sum_by(by)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], sum_by("gather")[0])


def test_a_quantised_sum_is_the_same_on_all_ranks_and_near_the_exact_one() -> None:
    found, exact = sum_by("dense", bits=8), sum_by("gather")[0]
    assert all(torch.equal(one, found[0]) for one in found)
    assert not torch.equal(found[0], exact)
    assert (found[0] - exact).abs().max() < 0.2 * exact.abs().max()


def test_auto_compresses_on_a_slow_link_and_not_on_a_fast_one() -> None:
    num_bytes, memory_beta = 4.0 * 25e6, 1e-10
    cost = codec_cost("topk", num_bytes)
    for beta, is_on in ((8e-8, True), (8e-9, True), (1e-10, False)):
        link = Link(alpha=1e-4, beta=beta)
        assert (forecast_coded(cost, 4, link, memory_beta) < 0.8 * forecast_dense(num_bytes, 4, link)) == is_on


def test_auto_decides_alike_on_all_ranks_and_sends_what_waits_the_way_it_was() -> None:
    def program(group: AbstractGroup) -> tuple[bool, bool]:
        codec, resumed = AutoCodec(), AutoCodec()
        codec.meet(BUCKET, group)
        resumed.remember({"residual/w": torch.ones(40, 50)})
        resumed.meet(BUCKET, group)
        return codec.sends_as_it_is(BUCKET), resumed.sends_as_it_is(BUCKET)

    found = run_virtual(program, 3).results
    assert len({fresh for fresh, _ in found}) == 1
    assert not any(resumed for _, resumed in found)
