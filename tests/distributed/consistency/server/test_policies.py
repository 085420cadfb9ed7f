"""What policies decide, without tensors or messages: any order of arrivals, held against the audit."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.consistency.server import (
    NEVER,
    AbstractPolicy,
    Arrival,
    Commit,
    Decision,
    Drop,
    Join,
    Leave,
    Release,
    Rounds,
    Script,
    make_policy,
    settings_of,
)
from weft.distributed.consistency.server.decisions import decode, encode
from weft.errors import CorruptFileError
from weft.proving.audit import audit_arrival, audit_rounds
from weft.specs import parse_plan
from weft.training.optimizers import SGD, Optimizer

NUM_WORKERS = 4


def play(policy: AbstractPolicy, order: Sequence[int], deaths: Sequence[int] = ()) -> list[Decision]:
    """Ranks arrive, then push whenever `order` names them and they may; versions are filled in as a server does."""
    decisions: list[Decision] = []
    steps: dict[int, int] = {}
    version = 0

    def note(found: Sequence[Decision]) -> None:
        nonlocal version
        for decision in found:
            version += isinstance(decision, Commit)
            if isinstance(decision, Release):
                steps[decision.rank] = decision.step
                decision = Release(decision.rank, decision.step, decision.stop, version)
            decisions.append(decision)

    for rank in range(NUM_WORKERS):
        note(policy.arrive(rank, None, 0.0))
    for moment, rank in enumerate(order, start=1):
        if moment in deaths:
            steps.pop(rank, None)
            note(policy.leave(rank, float(moment)))
        elif rank in steps:
            note(policy.push(rank, steps.pop(rank), float(moment)))
        while policy.alarm() <= moment:
            note(policy.ring(float(moment)))
    return decisions


orders = st.lists(st.integers(0, NUM_WORKERS - 1), max_size=60)
deaths = st.lists(st.integers(1, 60), max_size=2)
bounds = st.integers(0, 3)


@given(orders, deaths, bounds)
def test_no_rank_is_further_ahead_than_the_bound(order: list[int], dead: list[int], bound: int) -> None:
    assert audit_arrival(play(Arrival(NUM_WORKERS, bound), order, dead), NUM_WORKERS, bound) == []
    assert audit_rounds(play(Rounds(NUM_WORKERS, bound=bound), order, dead), NUM_WORKERS, bound=bound) == []


@given(orders, deaths, st.integers(0, 3))
def test_the_first_gradients_of_a_round_count_and_late_ones_are_dropped(
    order: list[int], dead: list[int], spare: int
) -> None:
    decisions = play(Rounds(NUM_WORKERS, spare=spare), order, dead)
    assert audit_rounds(decisions, NUM_WORKERS, spare=spare) == []


@given(orders, deaths)
def test_without_a_bound_nobody_waits(order: list[int], dead: list[int]) -> None:
    decisions = play(Arrival(NUM_WORKERS), order, dead)
    assert audit_arrival(decisions, NUM_WORKERS) == []
    pushes = sum(isinstance(decision, Commit) for decision in decisions)
    assert sum(isinstance(decision, Release) for decision in decisions) == NUM_WORKERS + pushes


@given(orders)
def test_a_bound_that_is_never_reached_is_no_bound(order: list[int]) -> None:
    assert play(Arrival(NUM_WORKERS, 10**9), order) == play(Arrival(NUM_WORKERS), order)


@given(orders)
def test_work_that_is_dealt_out_is_taken_once(order: list[int]) -> None:
    steps = [decision.step for decision in play(Arrival(NUM_WORKERS), order) if isinstance(decision, Release)]
    assert sorted(steps) == list(range(len(steps)))


MAKERS: dict[str, Callable[[], AbstractPolicy]] = {
    "async": lambda: Arrival(NUM_WORKERS),
    "stale": lambda: Rounds(NUM_WORKERS, bound=2),
    "backup": lambda: Rounds(NUM_WORKERS, spare=1, deadline=3.0),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(order=orders, dead=deaths, other=st.randoms(use_true_random=False))
def test_a_script_repeats_decisions_whatever_the_order_of_arrival(
    make: Callable[[], AbstractPolicy], order: list[int], dead: list[int], other: random.Random
) -> None:
    recorded = play(make(), order, dead)
    script = Script(recorded)
    shuffled = list(range(NUM_WORKERS)) * 80
    other.shuffle(shuffled)
    again = [d for d in play(script, shuffled) if not (isinstance(d, Release) and d.stop)]
    assert again == recorded and script.num_left == 0


def test_a_script_that_is_over_stops_those_who_ask() -> None:
    script = Script([Release(0, 0)])
    assert script.arrive(0, None, 0.0) == [Release(0, 0)]
    assert script.push(0, 0, 0.0) == [Release(0, 1, stop=True)]
    assert script.num_left == 0


def test_a_rank_that_comes_back_gets_weights_and_work() -> None:
    policy = Arrival(2, bound=1)
    for rank in range(2):
        policy.arrive(rank, None, 0.0)
    policy.push(0, 0, 1.0)
    assert policy.leave(1, 2.0) == [Leave(1)]
    assert policy.arrive(1, None, 3.0) == [Join(1), Release(1, 3)]
    rounds = Rounds(2)
    for rank in range(2):
        rounds.arrive(rank, None, 0.0)
    rounds.leave(1, 0.0)
    assert rounds.push(0, 0, 1.0) == [Commit(((0, 0),)), Release(0, 1)]
    assert rounds.arrive(1, None, 2.0) == [Join(1), Release(1, 1)]
    assert rounds.push(0, 1, 3.0) == []  # it is waited for again


def test_a_restored_shard_goes_on_where_its_ranks_are() -> None:
    rounds = Rounds(2, is_fresh=False)
    assert rounds.arrive(0, 41, 0.0) == [Join(0), Release(0, 41)]
    assert rounds.arrive(1, 41, 0.0) == [Join(1), Release(1, 41)]
    assert rounds.push(0, 41, 1.0) == []
    closed = rounds.push(1, 41, 1.0)
    assert closed == [Commit(((0, 41), (1, 41))), Release(0, 42), Release(1, 42)]


def test_a_restored_shard_waits_only_for_ranks_that_have_come() -> None:
    """Rank 2 died or ended before; its clock was once the slowest for ever."""
    plan = parse_plan("data=3 consistency=stale(1,commit=arrival) topology=server")
    policy = make_policy(plan.consistency, 3, is_fresh=False)
    assert policy.arrive(0, 41, 0.0) == [Join(0), Release(0, 41)]
    assert policy.arrive(1, 42, 0.0) == [Join(1), Release(1, 42)]
    for step in (43, 45, 47):
        for rank in range(2):
            _, release = policy.push(rank, step - 2 + rank, 1.0)
            assert release == Release(rank, step + rank)
    assert policy.leave(2, 2.0) == []


@pytest.mark.parametrize(
    ("text", "num_batches", "first"),
    [("elastic(8)", 2, 1), ("elastic(8)", 8, 4), ("elastic(8)", 0, 0), ("async", 1, 4), ("async", 0, 0)],
)
def test_a_resumed_training_leaves_no_work_out(text: str, num_batches: int, first: int) -> None:
    # Regression: the N stints that a training deals out in advance were passed over, up to tau - 1 batches.
    plan = parse_plan(f"data=4 consistency={text} topology=server")
    policy, settings = make_policy(plan.consistency, 4), settings_of(plan, Optimizer(SGD(), lr=0.1))
    step = settings.first_after(num_batches)
    assert settings.batch_of(step * settings.period) == num_batches
    released = [policy.arrive(rank, step, 0.0) for rank in (2, 0, 3, 1)]
    assert released == [[Release(rank, first + place)] for place, rank in enumerate((2, 0, 3, 1))]
    assert policy.push(0, first + 1, 1.0)[-1] == Release(0, first + 4)


def test_a_restored_shard_does_not_deal_out_again_what_ranks_took_in_advance() -> None:
    assert Arrival(4, is_fresh=False).arrive(0, 1, 0.0) == [Join(0), Release(0, 4)]


def test_all_are_told_to_stop() -> None:
    policy = Rounds(2)
    policy.arrive(0, None, 0.0)
    policy.push(0, 0, 0.0)
    assert policy.stop() == [Release(0, 1, stop=True)]
    assert policy.arrive(1, None, 0.0) == [Release(1, 0, stop=True)]


def test_a_round_is_closed_at_its_deadline() -> None:
    policy = Rounds(3, deadline=5.0)
    for rank in range(3):
        policy.arrive(rank, None, 10.0)
    assert policy.alarm() == NEVER
    policy.push(1, 0, 11.0)
    assert policy.alarm() == 15.0
    assert policy.ring(15.0) == [Commit(((1, 0),)), Release(1, 1)]
    assert policy.push(0, 0, 16.0) == [Drop(0, 0), Release(0, 1)]


def test_the_best_deadline_is_found_from_arrivals() -> None:
    policy, now = Rounds(3, deadline=None), 0.0
    for rank in range(3):
        policy.arrive(rank, None, now)
    for step in range(8):
        for rank, seconds in enumerate((1.0, 1.25, 50.0)):
            policy.push(rank, step, now + seconds)
        now += 50.0
    policy.push(0, 8, now + 1.0)
    assert policy.alarm() == pytest.approx(now + 1.1 * 1.25)


def play_rounds(policy: Rounds, seconds: Sequence[float], num_rounds: int) -> list[tuple[float, int]]:
    """When each round was closed and of how many gradients, by ranks that take as long for each."""
    under_way: list[tuple[float, int, int]] = []
    closed: list[tuple[float, int]] = []

    def follow(decisions: Sequence[Decision], now: float) -> None:
        for decision in decisions:
            if isinstance(decision, Release):
                heapq.heappush(under_way, (now + seconds[decision.rank], decision.rank, decision.step))
            elif isinstance(decision, Commit):
                closed.append((now, len(decision.pushes)))

    for rank in range(len(seconds)):
        follow(policy.arrive(rank, None, 0.0), 0.0)
    while len(closed) < num_rounds:
        if (alarm := policy.alarm()) <= under_way[0][0]:
            follow(policy.ring(alarm), alarm)
        else:
            now, rank, step = heapq.heappop(under_way)
            follow(policy.push(rank, step, now), now)
    return closed


@pytest.mark.parametrize("times_slower", [2.5, 3.0, 5.0, 10.0])
def test_rounds_do_not_wait_for_a_rank_that_is_always_slow(times_slower: float) -> None:
    """Once, only rounds that this rank took part in were looked at: too few of them, and no deadline for most."""
    closed = play_rounds(Rounds(4, deadline=None), (1.0, 1.01, 1.02, times_slower), 160)
    rounds = [after[0] - before[0] for before, after in pairwise(closed[40:])]
    assert max(rounds) <= 1.1 * 1.02 + 1e-9
    assert sum(count for _, count in closed[40:]) >= 3 * len(rounds)


def test_rounds_of_ranks_that_hardly_differ_are_whole() -> None:
    closed = play_rounds(Rounds(4, deadline=None), (1.0, 1.01, 1.02, 1.03), 100)
    assert {count for _, count in closed} == {4}


# ---- the audit, on decisions with a fault in them


def test_an_update_that_is_made_twice_is_found() -> None:
    decisions = play(Arrival(NUM_WORKERS), [0, 1])
    twice = [*decisions, next(d for d in decisions if isinstance(d, Commit))]
    assert audit_arrival(twice, NUM_WORKERS) == ["the gradient of rank 0 for step 0 was used twice"]


@pytest.mark.parametrize("bound", [0, 2])
def test_a_bound_that_is_off_by_one_is_found(bound: int) -> None:
    order = [0] * 8
    arrival = play(Arrival(NUM_WORKERS, bound + 1), order)
    assert "ahead of the slowest" in audit_arrival(arrival, NUM_WORKERS, bound)[0]
    rounds = play(Rounds(NUM_WORKERS, bound=bound + 1), order)
    assert "was let go to step" in audit_rounds(rounds, NUM_WORKERS, bound=bound)[0]


def test_a_late_gradient_that_is_not_dropped_is_found() -> None:
    decisions = play(Rounds(NUM_WORKERS, spare=1), [0, 1, 2, 3])
    used = [Commit(((d.rank, d.step),)) if isinstance(d, Drop) else d for d in decisions]
    assert any("late gradient was not dropped" in fault for fault in audit_rounds(used, NUM_WORKERS, spare=1))


def test_a_round_that_is_closed_too_early_is_found() -> None:
    decisions = play(Rounds(NUM_WORKERS, spare=2), [0, 1])
    assert "closed without 2 ranks" in audit_rounds(decisions, NUM_WORKERS, spare=1)[0]


def test_a_wrong_version_and_an_unasked_step_are_found() -> None:
    assert "got version 3" in audit_arrival([Release(0, 0, version=3)], 1)[0]
    assert "was never told to take it" in audit_arrival([Commit(((0, 0),))], 1)[0]


@pytest.mark.parametrize("decision", [Commit(((0, 1), (2, 1))), Release(1, 2, True, 3), Drop(0, 4), Leave(1), Join(2)])
def test_decisions_are_read_back(decision: Decision) -> None:
    assert decode(encode(decision)) == decision


@pytest.mark.parametrize("line", [[], ["commit"], ["commit", [1]], ["release", 1, 2, 3], ["drop", 1, "x"], {"a": 1}, 3])
def test_what_is_no_decision_is_refused(line: object) -> None:
    with pytest.raises(CorruptFileError, match="decision cannot be read"):
        decode(line)


def test_a_deadline_of_no_rank_is_never() -> None:
    assert Rounds(2, deadline=math.inf).alarm() == NEVER
