"""Which process of a plan is which, and the proof of plans with servers."""

import subprocess
import sys

import pytest

from weft.engines.local import STRICT, End, Tolerance
from weft.engines.place import Place
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.errors import PlanError
from weft.recipes import find_recipe
from weft.specs import parse_plan

ASYNC = "data=4 consistency=async topology=server(shards=2{})"


def test_rank_0_and_holders_of_shards_cannot_be_done_without() -> None:
    assert tolerance_of(parse_plan("data=4")) is STRICT
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
    assert tolerance.restores(End(2, -9, 0.0), 0)
    assert not tolerance.restores(End(2, -9, 0.0), 1)
    assert not tolerance.restores(End(2, 3, 0.0), 0)


def test_another_number_of_processes_is_refused() -> None:
    recipe = find_recipe("digits_mlp").with_setting("plan", ASYNC.format(""))
    with (
        pytest.raises(PlanError, match="another number of processes"),
        use_replicas(Service(recipe, (0,)), Place("weft", 0, 2, "", 2)),
    ):
        pass


@pytest.mark.slow
def test_a_plan_with_servers_is_proved() -> None:
    plan = "data=2 consistency=stale(1) topology=server(shards=1,place=own)"
    command = [sys.executable, "-m", "weft", "prove", "digits_mlp", "--plan", plan, "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "weights and optimizer state are where the equations lead" in done.stdout
    assert "again by its record, to the last bit" in done.stdout
