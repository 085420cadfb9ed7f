"""Schedules as data: every rank's contribution once in every part, no blocking, the stated cost; up to 64 ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.distributed.collectives import Action, Move, Schedule
from weft.distributed.collectives import schedules as library
from weft.distributed.collectives.moves import part_bounds
from weft.planning.collective_cost import (
    Algorithm,
    AllReduceAlgorithm,
    LevelAlgorithm,
    all_reduce_cost,
    collective_cost,
)
from weft.planning.cost import Cost

Maker = Callable[[int, int], Schedule]
Holding = list[list[int]]
"""holding[rank][part] counts whose contributions are in it: one byte of the number for each rank."""


def of(*ranks: int) -> int:
    return sum(1 << (8 * rank) for rank in ranks)


def simulate(schedules: list[Schedule], holding: Holding) -> None:
    """Play all ranks' rounds in step; assert that every message of a round has its other side in the same round."""
    assert len({len(schedule) for schedule in schedules}) == 1, "ranks are out of step"
    for moves_of in zip(*schedules, strict=True):
        sent = {
            (rank, move.peer): [holding[rank][part] for part in range(*move.parts)]
            for rank, moves in enumerate(moves_of)
            for move in moves
            if move.action is Action.SEND
        }
        for rank, moves in enumerate(moves_of):
            for move in moves:
                if move.action is Action.SEND:
                    continue
                parts = sent.pop((move.peer, rank))
                assert len(parts) == move.parts[1] - move.parts[0], "a message of another length"
                for part, arrived in zip(range(*move.parts), parts, strict=True):
                    if move.action is Action.REDUCE:
                        holding[rank][part] += arrived
                    else:
                        holding[rank][part] = arrived
        assert not sent, f"nobody receives {sent.keys()}"


def cost_of(schedules: list[Schedule], part_lengths: list[int]) -> list[Cost]:
    """Count what the formulas state, rank by rank."""

    def length(move: Move) -> int:
        return sum(part_lengths[part] for part in range(*move.parts))

    def largest(moves: tuple[tuple[Move, ...], ...]) -> int:
        return max((length(move) for row in moves for move in row if move.action is Action.SEND), default=0)

    def total(schedule: Schedule, action: Action) -> int:
        return sum(length(move) for row in schedule for move in row if move.action is action)

    rounds = list(zip(*schedules, strict=True))
    path = sum(map(largest, rounds))
    chain = longest_chain(schedules)
    return [Cost(total(s, Action.SEND), chain, path, total(s, Action.REDUCE)) for s in schedules]


def longest_chain(schedules: list[Schedule]) -> int:
    """Messages of which each waits for the one before."""
    depth = [0] * len(schedules)
    for moves_of in zip(*schedules, strict=True):
        arrived = [[depth[m.peer] + 1 for m in moves if m.action is not Action.SEND] for moves in moves_of]
        depth = [max([own, *others]) for own, others in zip(depth, arrived, strict=True)]
    return max(depth)


def assert_alike(counted: list[Cost], stated: Sequence[Cost]) -> None:
    assert [vars(cost) for cost in counted] == [pytest.approx(vars(cost)) for cost in stated]


def all_reduce_of(name: str, size: int, ranks_per_host: int, by: LevelAlgorithm) -> tuple[list[Schedule], int]:
    two_level_parts = library.hierarchical_parts(size, ranks_per_host)
    makers: dict[str, tuple[Maker, int]] = {
        "ring": (library.ring, size),
        "tree": (library.tree, 1),
        "halving_doubling": (library.halving_doubling, 1 << (size.bit_length() - 1)),
        "hierarchical": (partial(library.hierarchical, ranks_per_host=ranks_per_host, by=by), two_level_parts),
    }
    maker, num_parts = makers[name]
    return [maker(rank, size) for rank in range(size)], num_parts


LEVELS: tuple[LevelAlgorithm, ...] = ("ring", "halving")
NAMES = ("ring", "tree", "halving_doubling", "hierarchical")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(size=st.integers(1, 64), ranks_per_host=st.integers(1, 9), by=st.sampled_from(LEVELS))
def test_all_reduce_adds_every_rank_once_in_every_part(
    name: str, size: int, ranks_per_host: int, by: LevelAlgorithm
) -> None:
    schedules, num_parts = all_reduce_of(name, size, ranks_per_host, by)
    holding = [[of(rank)] * num_parts for rank in range(size)]
    simulate(schedules, holding)
    everyone = of(*range(size))
    assert all(part == everyone for parts in holding for part in parts)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30)
@given(
    size=st.integers(1, 64), ranks_per_host=st.integers(1, 9), per_part=st.integers(1, 3), by=st.sampled_from(LEVELS)
)
def test_all_reduce_costs_what_the_formula_says(
    name: AllReduceAlgorithm, size: int, ranks_per_host: int, per_part: int, by: LevelAlgorithm
) -> None:
    schedules, num_parts = all_reduce_of(name, size, ranks_per_host, by)
    counted = cost_of(schedules, [per_part] * num_parts)
    stated = all_reduce_cost(Algorithm(name, ranks_per_host, by), size, per_part * num_parts)
    assert_alike(counted, stated.addresses)


@settings(max_examples=30)
@given(size=st.integers(1, 64), root=st.integers(0, 63))
def test_a_reduction_reaches_its_root_and_a_broadcast_everyone(size: int, root: int) -> None:
    root %= size
    whole = [[of(rank)] for rank in range(size)]
    simulate([library.reduce(rank, size, root) for rank in range(size)], whole)
    assert whole[root] == [of(*range(size))]
    simulate([library.broadcast(rank, size, root) for rank in range(size)], whole)
    assert all(held == [of(*range(size))] for held in whole)


@settings(max_examples=30)
@given(size=st.integers(1, 64))
def test_all_gather_and_barrier_reach_everyone(size: int) -> None:
    gathered = [[of(part) if part == rank else 0 for part in range(size)] for rank in range(size)]
    simulate([library.all_gather(rank, size) for rank in range(size)], gathered)
    assert all(row == [of(part) for part in range(size)] for row in gathered)
    # A barrier is one when every rank has heard, through others, of all: tokens carry all that their sender knows.
    heard = [{rank} for rank in range(size)]
    for round_number in range(len(library.barrier(0, size))):
        moves = [library.barrier(rank, size)[round_number] for rank in range(size)]
        heard = [heard[rank] | heard[moves[rank][1].peer] for rank in range(size)]
    assert all(known == set(range(size)) for known in heard)


@pytest.mark.parametrize("size", range(1, 10))
def test_other_collectives_cost_what_the_formula_says(size: int) -> None:
    makers: dict[str, tuple[Callable[[int], Schedule], int]] = {
        "all_gather": (lambda rank: library.all_gather(rank, size), size),
        "all_to_all": (lambda rank: library.all_to_all(rank, size), size),
        "barrier": (lambda rank: library.barrier(rank, size), 2),
        "broadcast": (lambda rank: library.broadcast(rank, size, 0), 1),
        "reduce": (lambda rank: library.reduce(rank, size, 0), 1),
    }
    for name, (maker, num_parts) in makers.items():
        counted = cost_of([maker(rank) for rank in range(size)], [4] * num_parts)
        stated = collective_cost(name, size, 4 if name == "barrier" else 4 * num_parts)  # type: ignore[arg-type]
        assert_alike(counted, stated.addresses)


def test_the_simulation_refuses_a_schedule_that_would_block() -> None:
    late: Schedule = ((), (Move(Action.RECV, 0, (0, 1)),))
    early: Schedule = ((Move(Action.SEND, 1, (0, 1)),), ())
    with pytest.raises(AssertionError):
        simulate([early, late], [[0], [0]])


@given(length=st.integers(0, 1000), num_parts=st.integers(1, 64))
def test_parts_cover_a_message_and_differ_by_one(length: int, num_parts: int) -> None:
    bounds = part_bounds(length, num_parts)
    lengths = [end - begin for begin, end in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, length, num_parts)
    assert max(lengths) - min(lengths) <= 1 and sorted(lengths, reverse=True) == lengths


def picture(schedule: Schedule) -> list[str]:
    return [" ".join(f"{move.action.value}({move.parts[0]}:{move.parts[1]})@{move.peer}" for move in moves)
            for moves in schedule]  # fmt: skip


def test_small_schedules_as_pictures() -> None:
    assert picture(library.ring(0, 3)) == [
        "send(2:3)@1 reduce(1:2)@2",
        "send(1:2)@1 reduce(0:1)@2",
        "send(0:1)@1 recv(2:3)@2",
        "send(2:3)@1 recv(1:2)@2",
    ]
    assert picture(library.halving_doubling(2, 5)) == [
        "",
        "send(2:4)@4 reduce(0:2)@4",
        "send(0:1)@0 reduce(1:2)@0",
        "send(1:2)@0 recv(0:1)@0",
        "send(0:2)@4 recv(2:4)@4",
        "",
    ]
    assert picture(library.tree(0, 3)) == ["reduce(0:1)@1", "reduce(0:1)@2", "send(0:1)@2", "send(0:1)@1"]
