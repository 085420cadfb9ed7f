"""A new consistency is its own file and one row of the table, by which it is parsed, refused, simulated and proved."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.consistency.cases import prove, small_mlp
from tests.distributed.consistency.follow_leader import AT_SERVERS, IN_A_GROUP, FollowLeader
from tests.proving import test_served
from tests.simulation.test_simulation import run, tiny
from weft.errors import PlanError
from weft.specs import parse_plan
from weft.specs.axes import AXES, Limit, Traits, Value


def register(monkeypatch: pytest.MonkeyPatch, value: Value) -> None:
    monkeypatch.setitem(AXES["consistency"], "leader", value)


def test_it_is_proved_in_a_group_and_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, IN_A_GROUP)
    proof = prove(small_mlp(), 3, "leader(2)")
    assert proof.passed and proof.is_bitwise, proof.finding
    monkeypatch.setattr(FollowLeader, "after_update", lambda self, state: state)
    assert not prove(small_mlp(), 3, "leader(2)").passed


def test_it_is_proved_at_servers_and_one_of_another_bound_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, AT_SERVERS)
    recipe = test_served.planned("leader(1)")
    proof = test_served.prove(recipe, tmp_path)
    assert proof.passed, proof.finding
    told = str(recipe.mutable.plan).replace("bound=1", "bound=0")
    assert not test_served.prove(recipe, tmp_path / "again", said=told).passed


@pytest.mark.parametrize(
    ("value", "plan"),
    [(IN_A_GROUP, "data=3 consistency=leader(2)"), (AT_SERVERS, "data=3 consistency=leader topology=server")],
    ids=["group", "servers"],
)
def test_it_is_simulated(value: Value, plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, value)
    (repetition,) = run(tmp_path / "run", tiny(plan)).record.repetitions
    assert repetition.values["step_time"] >= 0.01


def test_its_traits_and_limits_refuse_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(lambda given, num_ranks: given["steps"] > num_ranks, "too rarely", lambda size: {"steps": size})
    register(monkeypatch, replace(IN_A_GROUP, limits=(limit,)))
    with pytest.raises(PlanError, match=r"too rarely .*nearest: data=2 consistency=leader\(steps=2\)"):
        parse_plan("data=2 consistency=leader(3)")
    with pytest.raises(PlanError, match="no all-reduce whose algorithm"):
        parse_plan("data=2 consistency=leader topology=ring")
    register(monkeypatch, replace(IN_A_GROUP, traits=Traits(sends="weights", has_all_reduce=True)))
    assert parse_plan("data=2 consistency=leader topology=ring").channel == "all_reduce"
