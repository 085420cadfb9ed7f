"""The deaths that the run of a plan survives, and who may be started again."""

import pytest

from weft.engines.engine import STRICT, End, Tolerance
from weft.engines.tolerance import check_restarts, tolerance_of
from weft.errors import UsageError
from weft.specs import parse_plan

ASYNC = "data=4 consistency=async topology=server(shards=2{})"


def test_rank_0_and_holders_of_shards_cannot_be_done_without() -> None:
    assert tolerance_of(parse_plan("data=4")) == STRICT
    shared = tolerance_of(parse_plan(ASYNC.format("")))
    assert (shared.expendable, shared.restored) == (frozenset({2, 3}), frozenset())
    own = tolerance_of(parse_plan(ASYNC.format(",place=own")))
    assert (own.expendable, own.restored) == (frozenset({1, 2, 3}), frozenset({4, 5}))
    hosts = tolerance_of(parse_plan("data=5 consistency=async topology=server(inner=2)"))
    assert (hosts.expendable, hosts.restored) == (frozenset({1, 3}), frozenset())
    own_hosts = tolerance_of(parse_plan("data=5 consistency=async topology=server(1,own,2)"))
    assert own_hosts.restored == frozenset({5, 6, 7, 8})


def test_only_the_killed_are_spared_or_restored() -> None:
    tolerance = Tolerance(frozenset({1}), frozenset({2}), most_restarts=1)
    assert tolerance.spares(End(1, -9, 0.0))
    assert not tolerance.spares(End(1, 1, 0.0))  # an error of its own
    assert not tolerance.spares(End(1, -2, 0.0))  # Ctrl-C
    assert not tolerance.spares(End(0, -9, 0.0))
    assert not tolerance.spares(End(1, -9, 0.0, has_joined=False))  # the others would wait for it
    assert tolerance.restores(End(2, -9, 0.0), 0)
    assert not tolerance.restores(End(2, -9, 0.0), 1)
    assert not tolerance.restores(End(2, 3, 0.0), 0)


def test_workers_are_taken_back_as_often_as_was_said() -> None:
    tolerance = tolerance_of(parse_plan("data=3 consistency=async topology=server"), restarts=2)
    assert tolerance.takes_back(End(1, -9, 0.0), 1)
    assert not tolerance.takes_back(End(1, -9, 0.0), 2)
    assert not tolerance.takes_back(End(0, -9, 0.0), 0)  # it keeps the record
    assert not tolerance.takes_back(End(1, 3, 0.0), 0)  # an error of its own
    assert tolerance.is_return(End(1, 0, 0.0, num_lives=2)) and not tolerance.is_return(End(1, 0, 0.0))


@pytest.mark.parametrize(
    ("plan", "num_seeds", "told"),
    [
        ("data=3", 1, "no worker that can be started again"),
        ("data=3 consistency=gossip(ring,mix=pair)", 1, "no worker that can be started again"),
        ("data=3 consistency=async topology=server(inner=2)", 1, "no worker that can be started again"),
        ("data=3 consistency=async topology=server(shards=3)", 1, "no worker that can be started again"),
        ("data=3 consistency=async topology=server", 2, "a run of one seed"),
    ],
)
def test_restarts_are_refused_where_nobody_can_be_taken_back(plan: str, num_seeds: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_restarts(parse_plan(plan), num_seeds)


@pytest.mark.parametrize("scheme", ["async", "stale(2,commit=arrival)", "backup(1)", "elastic(2)"])
def test_plans_whose_workers_are_taken_back(scheme: str) -> None:
    check_restarts(parse_plan(f"data=3 consistency={scheme} topology=server"), 1)


def test_only_rank_0_of_neighbours_cannot_be_done_without() -> None:
    assert tolerance_of(parse_plan("data=4 consistency=gossip(ring,mix=pair)")).expendable == frozenset({1, 2, 3})
