"""The contract of parts of different lengths: more programs for every kind of group."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.distributed.group.findings import DTYPES, Findings, Program, Report, perform, values
from weft.distributed.group import (
    AbstractGroup,
    AllGather,
    AllToAll,
    Call,
    ReduceScatter,
    Sizes,
    exchange_lengths,
    gather_lengths,
    gather_parts,
)


def all_sizes(size: int) -> list[Sizes]:
    """Growing from nothing, all at the last rank, nothing at all, and the same everywhere."""
    return [tuple(range(size)), (*(0,) * (size - 1), 257), (0,) * size, (3,) * size]


def cases(size: int) -> Iterator[tuple[torch.dtype, Sizes, tuple[int, ...], bool]]:
    """Types, sizes, the shape of a row, and whether to use the asynchronous form."""
    for number, dtype in enumerate(DTYPES):
        for index, sizes in enumerate(all_sizes(size)):
            yield dtype, sizes, ((), (3,))[(number + index) % 2], index % 2 == 0


def brought(rank: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return values(rank, rows * (3 if shape else 1), dtype).view(rows, *shape)


def uneven_all_gather(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, sizes, shape, later in cases(group.size):
        output = torch.full((sum(sizes), *shape), 9, dtype=dtype)
        own = brought(group.rank, sizes[group.rank], shape, dtype)
        perform(group, AllGather(output, own, sizes), later=later)
        wanted = torch.cat([brought(rank, rows, shape, dtype) for rank, rows in enumerate(sizes)])
        found.expect(f"all_gather {sizes} {shape} {dtype}", output, wanted)
        found.share(output)
    return found.report()


def uneven_reduce_scatter(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, sizes, shape, later in cases(group.size):
        # Two ranks bring the same: the values of five in a row add up to the same number everywhere.
        inputs = torch.stack([brought(rank // 2, sum(sizes), shape, dtype) for rank in range(group.size)])
        for op, total in (("sum", inputs.sum(0).to(dtype)), ("max", inputs.amax(0))):
            output = torch.full((sizes[group.rank], *shape), 9, dtype=dtype)
            perform(group, ReduceScatter(output, inputs[group.rank].clone(), op, sizes), later=later)  # type: ignore[arg-type]
            found.expect(f"reduce_scatter {op} {sizes} {dtype}", output, total.split(sizes)[group.rank])
    sizes = tuple(range(group.size))
    mean = torch.zeros(sizes[group.rank])
    group.reduce_scatter(mean, torch.full((sum(sizes),), float(group.rank)), "mean", sizes)
    found.expect_close("uneven mean", mean, torch.full_like(mean, (group.size - 1) / 2), 1e-6)
    return found.report()


def rows_between(size: int) -> list[list[Sizes]]:
    """Tables of who sends how many rows to whom: all different with zeros among them, all from the last rank to the
    first, nothing."""
    ranks = range(size)
    different = [tuple((3 * sender + 5 * receiver + 2) % 7 for receiver in ranks) for sender in ranks]
    one_way = [tuple(257 * (sender == size - 1 and receiver == 0) for receiver in ranks) for sender in ranks]
    return [different, one_way, [(0,) * size for _ in ranks]]


def uneven_all_to_all(group: AbstractGroup) -> Report:
    found = Findings(group)
    for number, table in enumerate(rows_between(group.size)):
        for index, dtype in enumerate(DTYPES):
            shape = ((), (3,))[(number + index) % 2]
            sends, recvs = table[group.rank], tuple(row[group.rank] for row in table)
            output = torch.full((sum(recvs), *shape), 9, dtype=dtype)
            own = brought(group.rank, sum(sends), shape, dtype)
            perform(group, AllToAll(output, own, sends, recvs), later=index % 2 == 0)
            inputs = [brought(rank, sum(row), shape, dtype) for rank, row in enumerate(table)]
            parts = [tensor.split(row)[group.rank] for tensor, row in zip(inputs, table, strict=True)]
            found.expect(f"all_to_all {table} {dtype}", output, torch.cat(parts))
    return found.report()


def uneven_in_flight(group: AbstractGroup) -> Report:
    """Calls of unequal and of equal parts under way together, over tensors of `empty` and strided ones, in the whole
    and in a part."""
    found = Findings(group)
    part = group.split(colour=group.rank % 2, key=-group.rank)
    outputs, works = [], []
    for number, side in enumerate([group, part, group, part]):
        sizes = tuple(number + 2 * rank for rank in range(side.size))
        whole = side.empty((sum(sizes), 2)) if number < 2 else torch.empty(2, sum(sizes)).T
        own = torch.full((2, sizes[side.rank]), float(side.rank)).T
        works += [side.start(AllGather(whole, own, sizes))]
        equal = torch.empty(side.size)
        works += [side.start(AllGather(equal, torch.tensor([float(side.rank)])))]
        outputs += [(whole, equal, sizes)]
    for work in reversed(works):
        work.wait()
    for whole, equal, sizes in outputs:
        ranks = torch.arange(len(sizes)).float()
        found.expect(f"in flight {sizes}", whole, ranks.repeat_interleave(torch.tensor(sizes))[:, None].expand(-1, 2))
        found.expect("equal parts between them", equal, ranks)
    part.close()
    return found.report()


def uneven_large(group: AbstractGroup) -> Report:
    """Many rounds of a transport that works in chunks, and one part far longer than the others."""
    found = Findings(group)
    rank, last = group.rank, group.size - 1
    sizes = (*(1000 * other + 1 for other in range(last)), 700_001)
    whole = torch.empty(sum(sizes))
    group.all_gather(whole, torch.arange(sizes[rank]) + 0.5 * rank, sizes)
    for other, part in enumerate(whole.split(sizes)):
        found.expect(f"large all_gather, part {other}", part, torch.arange(sizes[other]) + 0.5 * other)
    total = torch.empty(sizes[rank])
    group.reduce_scatter(total, torch.arange(float(sum(sizes))), sizes=sizes)
    found.expect("large reduce_scatter", total, torch.arange(float(sum(sizes))).split(sizes)[rank] * group.size)
    received = tuple(sizes[rank] for _ in sizes)
    arrived = torch.empty(sum(received))
    group.all_to_all(arrived, torch.arange(float(sum(sizes))) + 0.5 * rank, sizes, received)
    for other, part in enumerate(arrived.split(received)):
        wanted = torch.arange(float(sum(sizes))).split(sizes)[rank] + 0.5 * other
        found.expect(f"large all_to_all, from {other}", part, wanted)
    return found.report()


def lengths_of_ones_own(group: AbstractGroup) -> Report:
    found = Findings(group)
    lengths = tuple((5 * rank + 2) % 4 for rank in range(group.size))
    found.expect_true("gather_lengths", gather_lengths(group, lengths[group.rank]) == lengths)
    sent = tuple(10 * group.rank + peer for peer in range(group.size))
    received = tuple(10 * peer + group.rank for peer in range(group.size))
    found.expect_true("exchange_lengths", exchange_lengths(group, sent) == received)
    parts = gather_parts(group, torch.full((lengths[group.rank], 2), float(group.rank)))
    for rank, part in enumerate(parts):
        found.expect(f"gather_parts, rank {rank}", part, torch.full((lengths[rank], 2), float(rank)))
    return found.report()


PROGRAMS: tuple[Program, ...] = (
    uneven_all_gather,
    uneven_reduce_scatter,
    uneven_all_to_all,
    uneven_in_flight,
    uneven_large,
    lengths_of_ones_own,
)


def growing(rank: int, size: int) -> tuple[Tensor, Tensor, Sizes]:
    """A part, a whole and their sizes; rank 0 has none."""
    sizes = tuple(range(size))
    return torch.ones(sizes[rank]), torch.ones(sum(sizes)), sizes


def gather_growing(rank: int, size: int) -> Call:
    part, whole, sizes = growing(rank, size)
    return AllGather(whole, part, sizes)


def scatter_growing(rank: int, size: int) -> Call:
    part, whole, sizes = growing(rank, size)
    return ReduceScatter(part, whole, "sum", sizes)


def exchange_growing(rank: int, size: int) -> Call:
    _, whole, sizes = growing(rank, size)
    return AllToAll(torch.ones(rank * size), whole, sizes, (rank,) * size)


COLLECTIVES: dict[str, Callable[[int, int], Call]] = {
    "uneven_all_gather": gather_growing,
    "uneven_reduce_scatter": scatter_growing,
    "uneven_all_to_all": exchange_growing,
}
