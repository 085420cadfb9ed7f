"""Streams of every support, sums of them on virtual ranks, and checks of what the ranks have in the end."""

from collections.abc import Callable, Generator, Sequence
from functools import reduce

import torch
from torch import Tensor

from weft.distributed.codecs import ReductionWork
from weft.distributed.codecs.sparse_sums import (
    INDEX_TYPE,
    Quantiser,
    SparseAlgorithm,
    SparseReduction,
    SparseStream,
    sum_sparse,
)
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.group.calls import Call
from weft.distributed.virtual import TEN_GIGABIT, VirtualResult, run_virtual
from weft.planning.network import NetworkModel

MakeReduction = Callable[[int, int], SparseReduction]
"""From rank and size."""

LENGTH = 840  # 3, 5, 7 and 8 divide it


def make_stream(
    indices: Tensor, length: int = LENGTH, dtype: torch.dtype = torch.float32, seed: int = 0
) -> SparseStream:
    """Whole numbers, whose sums are exact in any order; zero is one of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 9, (len(indices),), generator=generator).to(dtype)
    return SparseStream(length, values, indices.to(INDEX_TYPE))


def make_supports(kind: str, size: int, length: int = LENGTH) -> list[Tensor]:
    """Ascending indices of every rank."""
    generator = torch.Generator().manual_seed(size)
    if kind == "none":
        return [torch.empty(0)] * size
    if kind == "all":
        return [torch.arange(length)] * size
    if kind == "identical":
        return [torch.arange(0, length, 21)] * size
    if kind == "disjoint":
        return [torch.arange(rank, length, 2 * size) for rank in range(size)]
    if kind == "clustered":  # at both ends of the first part, and of other lengths on every rank
        return [torch.cat([torch.arange(9 + rank), torch.tensor([length - 1])]) for rank in range(size)]
    assert kind == "random"
    numbers = [torch.randperm(length, generator=generator)[: 30 + 5 * rank] for rank in range(size)]
    return [some.sort().values for some in numbers]


SUPPORTS = ("none", "all", "identical", "disjoint", "clustered", "random")


def run_sum(
    streams: Sequence[SparseStream],
    by: SparseAlgorithm,
    *,
    quantiser: Quantiser | None = None,
    network: NetworkModel = TEN_GIGABIT,
) -> VirtualResult:
    """Results are (dense sum, entries of the sum, traffic of the rank)."""
    size = len(streams)
    return run_reduction(lambda rank, _: sum_sparse(rank, size, streams[rank], by, quantiser=quantiser), size, network)


def run_reduction(make: MakeReduction, size: int, network: NetworkModel = TEN_GIGABIT) -> VirtualResult:
    def program(inner: AbstractGroup) -> tuple[object, ...]:
        group, entries = RecordingGroup(inner), 0

        def dense() -> Generator[Call | tuple[Call, ...], None, Tensor]:
            nonlocal entries
            total = yield from make(group.rank, group.size)
            entries = total.num_entries
            return total.to_dense()

        return ReductionWork(group, dense()).wait(), entries, group.traffic

    return run_virtual(program, size, network=network)


def in_rank_order(streams: Sequence[SparseStream]) -> Tensor:
    return reduce(torch.add, [stream.to_dense() for stream in streams])


def check_same_bits(result: VirtualResult) -> None:
    """On all ranks."""
    first, *others = [total for total, *_ in result.results]
    assert all(bits(first) == bits(other) for other in others), "ranks have different sums"


def check_sum(result: VirtualResult, expected: Tensor) -> None:
    """This sum to the last bit, on all ranks; zeros may have either sign."""
    check_same_bits(result)
    total = result.results[0][0]
    assert total.dtype == expected.dtype and torch.equal(total, expected), "the sum is another"


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


def make_quantiser(num_bits: int, block: int = 1024) -> Quantiser:
    """QSGD with the norm of each block; a byte for each value whatever its bits, and the same random numbers always."""
    levels = (1 << num_bits - 1) - 1

    def encode(values: Tensor) -> Tensor:
        parts = values.split(block) if len(values) else ()
        scales = torch.stack([part.norm() for part in parts]).float() if parts else torch.empty(0)
        generator = torch.Generator().manual_seed(7)
        codes = [
            ((part / scale.clamp(min=1e-30) * levels) + torch.rand(len(part), generator=generator)).floor()
            for part, scale in zip(parts, scales, strict=True)
        ]
        sent = torch.cat([code.clamp(-levels, levels).to(torch.int8) for code in codes]) if codes else torch.empty(0)
        return torch.cat([scales.view(torch.uint8), sent.to(torch.int8).view(torch.uint8)])

    def decode(sent: Tensor, out: Tensor) -> None:
        num_blocks = -(-len(out) // block)
        scales = sent[: 4 * num_blocks].clone().view(torch.float32)
        codes = sent[4 * num_blocks :].view(torch.int8)
        out.copy_(codes.to(out.dtype) / levels * scales.repeat_interleave(block)[: len(out)])

    return Quantiser(encode, decode, lambda length: length + 4 * -(-length // block))
