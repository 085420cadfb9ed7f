"""Gossip with all neighbours over the mailbox: without deaths that of a group, with them what is left goes on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.consistency.cases import trace
from tests.distributed.consistency.pairs.paired import Course, journals_of, run_pairs, train
from tests.distributed.consistency.pairs.test_schemes import same
from tests.distributed.consistency.server.served import make_parameters, momentum
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.consistency.pairs import (
    GossipReplicas,
    Mean,
    Mix,
    meeting,
)
from weft.distributed.consistency.pairs.meeting import mix
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.graph import State
from weft.planning.gossip_graphs import make_split
from weft.proving.audit import audit_pairs
from weft.proving.lockstep import trace_ranks
from weft.proving.method import Evidence
from weft.proving.paired import Paired
from weft.specs import parse_plan
from weft.training.replicas import Update

PLAN = "data={} consistency=gossip({},lost=drop)"


@pytest.mark.parametrize(("size", "graph"), [(2, "ring"), (4, "exponential"), (5, "torus")])
def test_without_deaths_it_is_the_gossip_of_a_group_to_the_last_bit(size: int, graph: str) -> None:
    recipe = small_mlp().with_setting("optimizer", "momentum")
    plan = PLAN.format(size, graph)
    case = case_of(recipe, plan, 4)
    found, _, _ = run_pairs(parse_plan(plan), lambda _, replicas: trace_ranks(case, replicas))
    expected = trace(case_of(recipe, f"data={size} consistency=gossip({graph})", 4))
    for own, reference in zip(found, expected, strict=True):
        assert own is not None
        assert all(same(a, b) for a, b in zip(own, reference, strict=True))


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_a_rank_that_dies_is_done_without_and_the_run_is_replayed(graph: str, tmp_path: Path) -> None:
    course = Course(5, graph, "during", 30, faults=[Kill(2, after_seconds=0.3)], run=tmp_path / "run")
    outcome = train(course)
    assert outcome.weights[2] is None and outcome.values["lost_ranks"] == 1
    assert [turns for rank, turns in enumerate(outcome.turns) if rank != 2] == [30] * 4
    journals = journals_of(tmp_path / "run", 5)
    mixes = [event for event in journals[3] if isinstance(event, Mix)]
    assert 2 in mixes[0].ranks and 2 not in mixes[-1].ranks
    assert isinstance(journals[0][-1], Mean) and journals[0][-1].ranks == (0, 1, 3, 4)
    assert audit_pairs(journals, make_split(graph, 5)) == []
    again = train(Course(5, graph, "during", 30, seconds=lambda rank, turn: 0.01, replay=tmp_path / "run"))
    assert same(outcome.mean, again.mean) and outcome.values == again.values


def take_turns(
    group: AbstractGroup, replicas: GossipReplicas, seconds: float, wishes_after: int | None
) -> Iterator[int]:
    """The turns of a rank, as they are done, until all agree to stop; after so many, if any, it wishes to."""
    parameters, optimizer = make_parameters(), momentum()
    replicas.join(State(parameters, {}, torch.zeros(0)))
    state, turns, has_stopped = optimizer.init(parameters), 0, False
    while not has_stopped:
        replicas.begin(1 / 4)
        group.clock.charge(seconds)
        _, state = replicas.finish(0.0, Update(optimizer, parameters, state, 0.1, None))
        turns += 1
        has_stopped = replicas.agree_to_stop(wishes_after is not None and turns > wishes_after)
        yield turns


def test_all_stop_after_the_same_turn() -> None:
    """Nobody stops before those who are ahead of it: they wait for its weights."""

    def work(group: AbstractGroup, replicas: GossipReplicas) -> int:
        wishes_after = 5 if replicas.mesh.rank == 3 else None
        return max(take_turns(group, replicas, 0.01 * (1 + replicas.mesh.rank), wishes_after))

    found, _, _ = run_pairs(parse_plan(PLAN.format(4, "ring")), work)
    assert len(set(found)) == 1 and 6 < (found[0] or 0) < 12


@pytest.mark.parametrize("options", ["lost=drop", "mix=pair"])
def test_who_has_met_the_target_leaves_and_nobody_waits_for_it(options: str) -> None:
    """Rank 0 stops before a turn that others may have begun."""

    def work(group: AbstractGroup, replicas: GossipReplicas) -> int:
        turns = 0
        for turns in take_turns(group, replicas, 0.01, None):
            if replicas.mesh.rank == 0 and turns == 3:
                replicas.dismiss()
                break
        return turns

    found, _, _ = run_pairs(parse_plan(f"data=4 consistency=gossip(ring,{options})"), work)
    assert found[0] == 3 and all(3 <= (turns or 0) < 6 for turns in found)


@pytest.mark.parametrize("is_planted", [False, True])
def test_it_is_held_to_the_equations(is_planted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a rank counts itself twice."""
    if is_planted:
        monkeypatch.setattr(meeting, "mix", lambda own, others: mix(own, [own, *others]))
    case = case_of(small_mlp(), PLAN.format(4, "ring"), 4)
    found, _, _ = run_pairs(case.plan, lambda _, replicas: Paired().trace(case, replicas), run=tmp_path)
    proof = Paired().judge(case, [Evidence([own for own in found if own is not None], tmp_path)])
    assert proof.passed is not is_planted, proof.finding
