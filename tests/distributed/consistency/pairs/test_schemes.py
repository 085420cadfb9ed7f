"""Averaging in pairs, carried out by virtual workers and responders: records, replays, deaths, cost."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.pairs.paired import Course, journals_of, run_pairs, train
from tests.distributed.consistency.server.served import make_parameters
from weft.distributed.consistency.pairs import NOBODY, Deal, Event, GossipReplicas, Mean, Pair, Step, weights
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import Duplicate
from weft.errors import RunFolderError
from weft.graph import State
from weft.planning.gossip_graphs import GRAPHS, make_split
from weft.proving.audit import audit_pairs
from weft.specs import parse_plan
from weft.training.optimizers import Adam, Optimizer

NUM_BYTES = sum(parameter.nbytes for parameter in make_parameters().values())


def same(first: dict[str, Tensor] | None, second: dict[str, Tensor] | None) -> bool:
    assert first is not None and second is not None
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("graph", sorted(GRAPHS))
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_run_is_audited_and_replayed_to_the_last_bit(graph: str, size: int, tmp_path: Path) -> None:
    """The replay has other speeds, so that without the record it would take another course."""
    first = train(Course(size, graph, run=tmp_path / "first"))
    journals = journals_of(tmp_path / "first", size)
    assert audit_pairs(journals, make_split(graph, size)) == []
    turned = Course(size, graph, seconds=lambda rank, turn: 0.01 * (size - rank))
    again = train(Course(size, graph, seconds=turned.seconds, run=tmp_path / "again", replay=tmp_path / "first"))
    assert all(same(a, b) for a, b in zip(first.weights, again.weights, strict=True))
    assert same(first.mean, again.mean) and first.values == again.values
    assert journals_of(tmp_path / "again", size)[0] == journals[0]
    assert not same(first.mean, train(turned).mean)


@pytest.mark.parametrize("mix", ["pair", "during"])
def test_a_run_with_a_codec_is_replayed_to_the_last_bit(mix: str, tmp_path: Path) -> None:
    first = train(Course(4, "ring", mix=mix, compress="bf16", run=tmp_path / "first"))
    slow = Course(4, "ring", seconds=lambda rank, turn: 0.01 * (4 - rank)).seconds
    again = train(Course(4, "ring", mix=mix, compress="bf16", seconds=slow, replay=tmp_path / "first"))
    assert all(same(a, b) for a, b in zip(first.weights, again.weights, strict=True))
    assert not same(first.mean, train(Course(4, "ring", mix=mix)).mean)


def test_every_piece_of_work_is_taken_and_a_slow_rank_takes_less(tmp_path: Path) -> None:
    outcome = train(Course(num_steps=20, seconds=lambda rank, turn: 0.03 if rank == 3 else 0.01, run=tmp_path))
    deals = [event.work for events in journals_of(tmp_path, 4) for event in events if isinstance(event, Deal)]
    assert set(range(80)) <= set(deals) and len(set(deals)) == len(deals)
    assert outcome.turns[3] < min(outcome.turns[:3]) / 2
    assert sum(outcome.turns) == 80
    # Alone at 0.01 s, three ranks and a third do 80 turns in 0.24 s. Nobody waited for the slow one but at the end.
    assert outcome.seconds < 0.30


def test_ranks_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any optimizer; those that only believe to mix go astray."""
    course = Course(8, "ring", num_steps=60, make_optimizer=lambda: Optimizer(Adam(), lr=0.05))
    outcome = train(course)
    assert outcome.values["lost_ranks"] == 0
    monkeypatch.setattr(weights, "average", lambda own, given: None)
    astray = train(course).values["consensus_distance"]
    assert 0 < outcome.values["consensus_distance"] < astray / 2


@pytest.mark.parametrize("dead", [1, 2], ids=["it answers", "it asks"])
def test_a_rank_that_dies_is_done_without_and_the_run_is_replayed(dead: int, tmp_path: Path) -> None:
    outcome = train(Course(num_steps=30, faults=[Kill(dead, after_seconds=0.2)], run=tmp_path / "run"))
    assert outcome.weights[dead] is None and outcome.values["lost_ranks"] == 1
    journals = journals_of(tmp_path / "run", 4)
    assert isinstance(journals[0][-1], Mean) and dead not in journals[0][-1].ranks
    assert audit_pairs(journals, make_split("ring", 4)) == []
    again = train(Course(num_steps=30, seconds=lambda rank, turn: 0.01, replay=tmp_path / "run"))
    assert same(outcome.mean, again.mean) and outcome.values == again.values


def test_who_is_left_alone_goes_on_alone(tmp_path: Path) -> None:
    """Rank 0 asks 1 and 3; without both it has nobody."""
    faults = [Kill(1, after_seconds=0.1), Kill(3, after_seconds=0.1)]
    outcome = train(Course(num_steps=40, faults=faults, run=tmp_path))
    steps = [event for event in journals_of(tmp_path, 4)[0] if isinstance(event, Step)]
    assert steps[0].partner in (1, 3) and steps[-1].partner == NOBODY
    assert outcome.values["lost_ranks"] == 2


def test_who_has_lost_its_neighbours_asks_another(tmp_path: Path) -> None:
    """On a ring of 6, rank 2 asks 1 and 3, and then 5."""
    faults = [Kill(1, after_seconds=0.1), Kill(3, after_seconds=0.1)]
    train(Course(6, num_steps=40, faults=faults, run=tmp_path))
    steps = [event for event in journals_of(tmp_path, 6)[2] if isinstance(event, Step)]
    assert {step.partner for step in steps[:3]} <= {1, 3} and steps[-1].partner == 5


def test_a_message_that_comes_twice_counts_once(tmp_path: Path) -> None:
    doubled = train(Course(faults=[Duplicate(2, 3, 4), Duplicate(0, 5, 3)], run=tmp_path))
    journals = journals_of(tmp_path, 4)
    assert audit_pairs(journals, make_split("ring", 4)) == []
    assert sum(doubled.turns) == 48


def test_the_audit_finds_planted_faults() -> None:
    split = make_split("ring", 2)
    fine: list[list[Event]] = [[Deal(0), Step(0, 1)], [Deal(1), Pair(0, 0), Step(0)]]
    assert audit_pairs(fine, split) == []
    assert "knows nothing of it" in audit_pairs([fine[0], [Deal(1), Step(0)]], split)[0]
    assert "given out 2 times" in audit_pairs([fine[0], [Deal(0), Pair(0, 0), Step(0)]], split)[0]
    assert "one after the other" in audit_pairs([[*fine[0], Step(2)], fine[1]], split)[0]
    assert "asked twice" in audit_pairs([fine[0], [*fine[1], Pair(0, 0)]], split)[0]
    assert "asks itself" in audit_pairs([[*fine[0], Pair(1, 0)], fine[1]], split)[0]


def test_a_run_without_a_record_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no record of its pairs"):
        train(Course(replay=tmp_path))


def test_a_resumed_training_begins_at_its_step_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    """Its record is of the rest alone, and is not replayed."""

    def work(group: AbstractGroup, replicas: GossipReplicas) -> tuple[int, float]:
        parameters = {"w": torch.zeros(3).requires_grad_()}
        replicas.join(State(parameters, {}, torch.zeros(0)))
        parameters["w"].data.fill_(1.0 + replicas.mesh.rank)  # what each read from a checkpoint
        replicas.remember(3, {})
        return replicas.next_step(3), float(parameters["w"].detach().sum())

    plan = parse_plan("data=4 consistency=gossip(ring,mix=pair)")
    found, _, _ = run_pairs(plan, work, run=tmp_path)
    assert found == [(3, 3.0)] * 4
    with pytest.raises(RunFolderError, match="resumed"):
        journals_of(tmp_path, 4)
