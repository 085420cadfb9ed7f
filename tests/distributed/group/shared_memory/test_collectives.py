"""Every call over real processes: both engines, sizes that are no powers of two, all types, odd shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.distributed.group.calls import ReduceOp
from weft.distributed.group.shared_memory import SharedMemoryGroup

Run = Callable[..., list[Any]]

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
LENGTHS = [0, 1, 7, 5_000, 300_001]  # one round, small and sliced, ragged chunks


def draw(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.rand(length, generator=generator) < 0.7
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, (length,), generator=generator).to(dtype)


def expect(size: int, length: int, dtype: torch.dtype, op: ReduceOp) -> Tensor:
    """In rank order; 16-bit floats in 32 bits and rounded once."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    combine: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add,
        "mean": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": torch.mul,
    }
    total = draw(0, length, dtype).to(wide)
    for rank in range(1, size):
        total = combine[op](total, draw(rank, length, dtype).to(wide))
    return (total / size if op == "mean" else total).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.long)])
def test_all_reduce_has_the_bits_of_a_sum_in_rank_order(run_ranks: Run, size: int, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[str]:
        wrong = []
        for dtype in [*FLOATS, *INTEGERS, torch.bool]:
            for length in LENGTHS if dtype in (torch.float32, torch.bfloat16) else LENGTHS[:4]:
                tensor = draw(group.rank, length, dtype)
                group.all_reduce(tensor)
                if not torch.equal(tensor, expect(group.size, length, dtype, "sum")):
                    wrong.append(f"{dtype} {length}")
        return wrong

    assert run_ranks(program, size, compiled=compiled) == [[]] * size


@pytest.mark.parametrize("op", ["mean", "min", "max", "product"])
def test_other_reductions(run_ranks: Run, op: ReduceOp, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[str]:
        wrong = []
        for dtype in FLOATS if op == "mean" else [*FLOATS, *INTEGERS, torch.bool]:
            for length in [5, 20_000]:
                tensor = draw(group.rank, length, dtype)
                group.all_reduce(tensor, op)
                if not torch.equal(tensor, expect(group.size, length, dtype, op)):
                    wrong.append(f"{dtype} {length}")
        return wrong

    assert run_ranks(program, 3, compiled=compiled) == [[]] * 3


@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("length", [5_000, 400_003])
def test_tensors_of_empty_are_reduced_in_place_to_the_same_bits(run_ranks: Run, size: int, length: int) -> None:
    def program(group: SharedMemoryGroup) -> bool:
        right = True
        for dtype in [torch.float32, torch.bfloat16]:
            tensor = group.empty((length,), dtype)
            tensor.copy_(draw(group.rank, length, dtype))
            group.all_reduce(tensor, "mean")
            right = right and torch.equal(tensor, expect(group.size, length, dtype, "mean"))
        return right

    assert run_ranks(program, size) == [True] * size


def test_a_tensor_of_empty_meets_others_that_are_not(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> bool:
        tensor = group.empty((50_000,)) if group.rank == 0 else torch.empty(50_000)
        tensor.copy_(draw(group.rank, 50_000, torch.float32))
        group.all_reduce(tensor)
        return torch.equal(tensor, expect(2, 50_000, torch.float32, "sum"))

    assert run_ranks(program, 2, compiled=compiled) == [True] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 3, 200_000])
def test_calls_that_move_parts(run_ranks: Run, size: int, length: int, compiled: bool) -> None:
    """Rank r's part p holds 100 r + p."""

    def mark(rank: int, part: int) -> Tensor:
        return torch.full((length,), 100.0 * rank + part)

    def program(group: SharedMemoryGroup) -> list[str]:
        rank, ranks, root = group.rank, range(group.size), group.size - 1
        mine = torch.cat([mark(rank, part) for part in ranks])
        results: dict[str, tuple[Tensor, Tensor]] = {}

        whole = torch.empty(size * length)
        group.all_gather(whole, mark(rank, 0))
        results["all_gather"] = whole, torch.cat([mark(r, 0) for r in ranks])

        part = torch.empty(length)
        group.reduce_scatter(part, mine)
        results["reduce_scatter"] = part, torch.full((length,), sum(100.0 * r + rank for r in ranks))

        whole = torch.empty(size * length)
        group.all_to_all(whole, mine)
        results["all_to_all"] = whole, torch.cat([mark(r, rank) for r in ranks])

        part = mark(rank, 7)
        group.broadcast(part, root)
        results["broadcast"] = part, mark(root, 7)

        part = mark(rank, 1)
        group.reduce(part, root)
        total = torch.full((length,), sum(100.0 * r + 1 for r in ranks))
        results["reduce"] = part, total if rank == root else mark(rank, 1)

        group.barrier()
        return [name for name, (got, wanted) in results.items() if not torch.equal(got, wanted)]

    assert run_ranks(program, size, compiled=compiled) == [[]] * size


@pytest.mark.parametrize("length", [3, 300_000])
def test_neighbours(run_ranks: Run, length: int, compiled: bool) -> None:
    graph = ((1, 2), (0,), (), (0, 2, 1))
    weights = ((0.5, 0.25, 0.25), (0.75, 0.25), (1.0,), (0.25, 0.25, 0.25, 0.25))

    def program(group: SharedMemoryGroup) -> bool:
        row = graph[group.rank]
        mixed = torch.full((length,), float(group.rank))
        group.neighbour_all_reduce(mixed, graph, weights)
        mix = sum(w * r for w, r in zip(weights[group.rank], (group.rank, *row), strict=True))
        return torch.equal(mixed, torch.full((length,), mix))

    assert run_ranks(program, 4, compiled=compiled) == [True] * 4


def test_strided_tensors_are_read_and_written(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[Any]:
        base = torch.zeros(4, 6)
        view = base.t()[::2]
        view += group.rank + 1
        group.all_reduce(view)
        pair = torch.zeros(2, 4)
        group.all_gather(pair.t(), torch.tensor([[1.0, 2.0]] * 2) + group.rank)
        received = torch.zeros(6, 2)[:, 0]
        if group.rank == 0:
            group.send(base[0], 1)
        else:
            group.recv(received, 0)
        return [base.tolist(), pair.tolist(), received.tolist()]

    base = [[3.0, 0.0, 3.0, 0.0, 3.0, 0.0]] * 4
    pair = [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 3.0, 3.0]]
    expected = [[base, pair, [0.0] * 6], [base, pair, base[0]]]
    assert run_ranks(program, 2, compiled=compiled) == expected


def test_a_huge_tensor(run_ranks: Run) -> None:
    length = 60_000_000  # 240 MB

    def program(group: SharedMemoryGroup) -> bool:
        tensor = torch.full((length,), float(group.rank + 1))
        group.all_reduce(tensor)
        return bool((tensor == 3.0).all())

    assert run_ranks(program, 2) == [True] * 2


def test_ranks_may_start_in_any_order(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> float:
        tensor = torch.ones(3)
        group.all_reduce(tensor)
        return float(tensor.sum())

    assert run_ranks(program, 3, compiled=compiled, late=(0,)) == [9.0] * 3
    assert run_ranks(program, 3, compiled=compiled, late=(1, 2)) == [9.0] * 3


def test_split_gives_groups_with_their_own_memory(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[float]:
        part = group.split(colour=group.rank % 2, key=-group.rank)
        tensor = torch.full((30_000,), float(group.rank))
        part.all_reduce(tensor)
        result = [part.rank, part.size, float(tensor[0])]
        part.close()
        group.barrier()
        return result

    expected = [[2, 3, 6.0], [1, 2, 4.0], [1, 3, 6.0], [0, 2, 4.0], [0, 3, 6.0]]
    assert run_ranks(program, 5, compiled=compiled) == expected
