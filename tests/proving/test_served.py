"""What servers make of gradients, held to the equations: true runs pass, and faults planted in the shard are found."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.consistency.server.faulty_updates import FAULTY_UPDATES, forgetful, true_update
from tests.distributed.consistency.server.test_hosts import far
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp, with_settings
from weft.distributed.consistency.server import Commit, Decision, Drop, Release, Rounds, Shard, read_decisions
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Delay
from weft.distributed.mailbox import MailFault
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import TEN_GIGABIT
from weft.planning.network import NetworkModel
from weft.proving.method import Case
from weft.proving.own_pace import train_to_the_end
from weft.proving.proof import Proof, copy_of
from weft.proving.served import audit, hold_to_equations, with_replay
from weft.specs import parse_plan
from weft.training.events import Event, StepStarted
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

NUM_BATCHES = 5


def run(
    recipe: Recipe, path: Path, faults: Sequence[MailFault] = (), network: NetworkModel = TEN_GIGABIT
) -> tuple[list[list[Decision]], dict[str, Tensor]]:
    """Some batches on virtual ranks, of which the last is slow: what the shards recorded, and the end."""
    case, plan = itself(recipe), recipe.mutable.plan

    def work(group: AbstractGroup, replicas: AbstractReplicas) -> dict[str, Tensor]:
        def pace(event: Event) -> None:
            if isinstance(event, StepStarted):
                group.clock.charge(0.035 if group.rank == plan.num_ranks - 1 else 0.01 + 0.001 * group.rank)

        state, _ = train_to_the_end(case, replicas, pace)
        with replicas.use_consensus(state.model):
            return copy_of(state.model.parameters, replicas.collect(state.optimizer))

    spec = RunSpec.of(recipe, (0,), run=path)
    ends = run_plan(plan, work, spec=spec, faults=faults, network=network).results
    return [read_decisions(path, 0, shard) for shard in range(plan.num_shards)], ends[0]


def itself(recipe: Recipe) -> Case:
    return case_of(recipe, str(recipe.mutable.plan), NUM_BATCHES)


def prove(recipe: Recipe, path: Path, said: str | None = None, **options: Any) -> Proof:
    """A run against the audit and the equations of its plan, or of another that it is said to have had."""
    decisions, end = run(recipe, path, **options)
    told = case_of(recipe, said or str(recipe.mutable.plan), NUM_BATCHES)
    faults = audit(told.plan, decisions)
    if faults:
        return Proof(False, False, 0, math.inf, 0.0, faults[0])
    return hold_to_equations(told, decisions, end)


def planned(scheme: str, num_shards: int = 2, **settings: object) -> Recipe:
    return small_mlp(plan=f"data=4 consistency={scheme} topology=server(shards={num_shards})", **settings)


@pytest.mark.parametrize(
    ("scheme", "num_shards"),
    [
        ("async", 1),
        ("async(staleness)", 2),
        ("async(share,difference)", 2),
        ("async(share,gradient,2)", 2),
        ("stale(2)", 1),
        ("stale(2)", 2),
        ("stale(2,commit=arrival,lr=full)", 2),
        ("backup(1)", 1),
        ("backup(1)", 2),
    ],
)
def test_weights_and_slots_are_where_the_equations_lead(scheme: str, num_shards: int, tmp_path: Path) -> None:
    proof = prove(planned(scheme, num_shards), tmp_path)
    assert proof.passed and proof.is_bitwise, proof.finding
    assert "weights and optimizer state are where the equations lead" in proof.finding


def test_shards_that_disagree_about_who_was_late_are_followed(tmp_path: Path) -> None:
    """Rank 1 is held up between its push to one shard and that to the other, which has then closed the round. Once, the
    audit took its next push there for one that it was never told to make."""
    recipe = planned("backup(1)")
    decisions, end = run(recipe, tmp_path, faults=[Delay(1, 0.06, first_call=4)])
    first, second = ([d for d in own if isinstance(d, Drop)] for own in decisions)
    assert first != second
    assert audit(recipe.mutable.plan, decisions) == []
    proof = hold_to_equations(itself(recipe), decisions, end)
    assert proof.is_bitwise, proof.finding


def test_host_servers_and_clipping_are_followed(tmp_path: Path) -> None:
    recipe = small_mlp(plan="data=5 consistency=async topology=server(shards=2,inner=3)", clip_norm=0.3)
    decisions, end = run(recipe, tmp_path, network=far())
    assert any(isinstance(d, Commit) and len(d.pushes) > 1 for d in decisions[0])
    proof = hold_to_equations(itself(recipe), decisions, end)
    assert proof.is_bitwise, proof.finding
    other = with_settings(recipe, clip_norm=0.4)
    assert not hold_to_equations(itself(other), decisions, end).passed


def test_dropout_accumulation_and_a_schedule_are_followed(tmp_path: Path) -> None:
    proof = prove(planned("stale(1)", accumulate=3, model__dropout=0.3, schedule="cosine"), tmp_path)
    assert proof.is_bitwise, proof.finding


# ---- faults


@pytest.mark.parametrize("scheme", ["async", "stale(2)", "stale(2,commit=arrival)", "backup(1)"])
@pytest.mark.parametrize("fault", FAULTY_UPDATES)
def test_a_fault_in_the_updates_is_found(
    fault: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, records were audited and replayed, and no more: a replay errs in the same way, and all of these passed."""
    monkeypatch.setattr(Shard, "_update", FAULTY_UPDATES[fault])
    proof = prove(planned(scheme), tmp_path)
    assert not proof.passed
    assert "by the equations of what was recorded" in proof.finding


def test_momentum_that_is_lost_after_the_last_update_is_found_in_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(shard: Shard, *given: Any) -> None:
        (forgetful if shard.version == 4 * NUM_BATCHES - 1 else true_update)(shard, *given)

    monkeypatch.setattr(Shard, "_update", late)
    assert "(velocity)" in prove(planned("async", 1), tmp_path).finding


@pytest.mark.parametrize(
    ("ran", "said"),
    [("async", "async(full)"), ("async(full)", "async(staleness)"), ("stale(2,commit=arrival)", "async(full)")],
)
def test_another_rule_for_the_learning_rate_is_found(ran: str, said: str, tmp_path: Path) -> None:
    plan = f"data=4 consistency={said} topology=server(shards=2)"
    assert not prove(planned(ran), tmp_path, said=plan).passed


def test_a_late_gradient_that_is_not_dropped_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_push = Rounds.push

    def push(rounds: Rounds, rank: int, step: int, now: float, others: Any = ()) -> Sequence[Decision]:
        decided = true_push(rounds, rank, step, now, others)
        return [Commit(((d.rank, d.step),)) if isinstance(d, Drop) else d for d in decided]

    monkeypatch.setattr(Rounds, "push", push)
    assert "a late gradient was not dropped" in prove(planned("backup(1)"), tmp_path).finding


@pytest.mark.parametrize(
    ("told", "is_right"),
    [("elastic(2,beta=0.9)", True), ("elastic(2,beta=1.2)", False), ("elastic(3,beta=0.9)", False)],
)
def test_the_centre_is_held_to_the_equations(told: str, is_right: bool, tmp_path: Path) -> None:
    """The planted faults are a run whose alpha, or whose tau, is not that of the plan which it is said to follow."""
    plan = "data=4 consistency={} topology=server(shards=2)"
    proof = prove(planned("elastic(2,beta=0.9)"), tmp_path, said=plan.format(told))
    assert proof.passed == is_right
    assert not is_right or "the centre is where the equations lead" in proof.finding


# ---- the verdict


def test_the_proof_tells_the_first_fault() -> None:
    plan = parse_plan("data=2 consistency=stale(0,commit=arrival) topology=server")
    ahead: list[Decision] = [Release(0, 0), Release(1, 1), Commit(((0, 0),)), Release(0, 2)]
    assert "1 steps ahead of the slowest" in audit(plan, [ahead])[0]
    assert audit(plan, [ahead[:3]]) == []


def test_the_verdict_needs_the_equations_and_the_replay() -> None:
    case = case_of(small_mlp(), "data=2 consistency=async topology=server", 1)
    held = Proof(True, True, 9, 0.0, 1e-5, "as it should be")
    passed = with_replay(case, held, is_same=True)
    assert passed.passed and "as it should be; and again by its record" in passed.finding
    assert "do not lead to the same" in with_replay(case, held, is_same=False).finding
    assert with_replay(case, replace(held, passed=False), is_same=True).finding == "as it should be"
