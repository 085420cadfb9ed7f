"""Elastic averaging through servers: the equations, followed in one process in the recorded order, and its faults."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.server.served import LR, Course, Outcome, make_parameters, pull, spec_of, train
from weft.distributed.consistency.elastic import draw_centre
from weft.distributed.consistency.server import (
    Commit,
    ServedReplicas,
    Settings,
    read_decisions,
    serve,
    settings_of,
)
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import VirtualMailbox
from weft.distributed.placement.cut import cut_evenly
from weft.distributed.virtual import run_virtual
from weft.graph import State
from weft.proving.audit import audit_arrival
from weft.specs import parse_plan
from weft.training.checkpoint import Entry
from weft.training.optimizers import SGD, AbstractOptimizer, Adam, Momentum, Nesterov, Optimizer, OptimizerState
from weft.training.replicas import Update

PLAN = "data=3 consistency=elastic(4,beta=0.9) topology=server(shards=2)"
NUM_STEPS = 16


class Rank:
    """One worker of algorithm 1, without servers or messages."""

    def __init__(self, optimizer: AbstractOptimizer) -> None:
        self.weights = make_parameters()
        self.state: OptimizerState = optimizer.init(self.weights)
        self.visitor: dict[str, Tensor] = {}
        self.seen: set[int] = set()  # shards that it has visited in this stint

    def take(self, optimizer: AbstractOptimizer, number: int, size: int, at: dict[str, Tensor]) -> None:
        batch, share = divmod(number, size)
        if batch < NUM_STEPS:
            gradients: dict[str, Tensor | None] = {name: pull(at[name], share, batch) for name in self.weights}
            self.state = optimizer.update(gradients, self.weights, self.state, LR)


@torch.no_grad()
def follow(text: str, run: Path, optimizer: AbstractOptimizer) -> dict[str, Tensor]:
    """The centre at the end, by the equations of the paper, visits being made in the order that shards recorded."""
    plan = parse_plan(text)
    size, num_shards, period = plan.num_ranks, int(plan.topology["shards"]), int(plan.consistency["steps"])
    alpha = float(plan.consistency["beta"]) / size
    centre, ranks = make_parameters(), [Rank(optimizer) for _ in range(size)]
    cuts = cut_evenly(centre, num_shards)
    orders = [
        [d.pushes[0] for d in read_decisions(run, 0, s) if isinstance(d, Commit)][::-1] for s in range(num_shards)
    ]
    while any(orders):
        for shard, order in enumerate(orders):
            if not order or shard in ranks[order[-1][0]].seen:
                continue
            number, stint = order.pop()
            rank = ranks[number]
            if not rank.seen:
                rank.visitor = {name: weight.clone() for name, weight in rank.weights.items()}
            for piece in cuts[shard]:
                place = piece.of(centre[piece.name])
                force = (piece.of(rank.visitor[piece.name]) - place) * alpha
                place += force
                piece.of(rank.weights[piece.name])[...] -= force
            rank.seen.add(shard)
            if len(rank.seen) == num_shards:
                rank.seen.clear()
                for i in range(period):
                    rank.take(optimizer, stint * period + i, size, rank.weights if i else rank.visitor)
    return centre


def is_as_followed(outcome: Outcome, text: str, run: Path, optimizer: AbstractOptimizer) -> bool:
    expected = follow(text, run, optimizer)
    found = outcome.weights[0]
    assert found is not None
    return all(torch.equal(found[name], expected[name]) for name in expected)


RULES: list[Callable[[], AbstractOptimizer]] = [
    lambda: Optimizer(SGD(), lr=LR),
    lambda: Optimizer(Momentum(), lr=LR),
    lambda: Optimizer(Nesterov(), lr=LR),
    lambda: Optimizer(Adam(), lr=LR),
]


@pytest.mark.parametrize("make", RULES, ids=["sgd", "momentum", "nesterov", "adam"])
def test_ranks_and_shards_do_what_the_paper_says_to_the_last_bit(
    make: Callable[[], AbstractOptimizer], tmp_path: Path
) -> None:
    outcome = train(PLAN, run=tmp_path, make_optimizer=make, num_steps=NUM_STEPS)
    assert is_as_followed(outcome, PLAN, tmp_path, make())
    assert outcome.servers[0].updates == NUM_STEPS * 3 // 4


def _wrong_alpha(settings: Settings) -> Settings:
    return replace(settings, alpha=2 * settings.alpha)


def _no_way_back(settings: Settings) -> Settings:
    return replace(settings, alpha=0.0)


def _every_step(settings: Settings) -> Settings:
    return replace(settings, period=1)


@pytest.mark.parametrize(
    "fault",
    [{"spoil_server": _wrong_alpha}, {"spoil_worker": _no_way_back}, {"spoil_worker": _every_step}],
    ids=["the centre moves by a wrong alpha", "the rank does not move back", "a visit in every step"],
)
def test_planted_faults_are_found(fault: dict[str, Any], tmp_path: Path) -> None:
    outcome = train(PLAN, run=tmp_path, num_steps=NUM_STEPS, **fault)
    assert not is_as_followed(outcome, PLAN, tmp_path, Course(parse_plan(PLAN)).make_optimizer())


def test_what_one_end_loses_the_other_gains() -> None:
    """The sum of a rank and the centre stays as it is: one force between them is all there is."""
    visitor, centre = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    total = visitor + centre
    force = draw_centre(centre, visitor, 0.25)
    torch.testing.assert_close((visitor - force) + centre, total)


def test_a_run_is_audited_and_replayed_to_the_last_bit(tmp_path: Path) -> None:
    first = train(PLAN, run=tmp_path / "first")
    other = train(PLAN, seconds=lambda rank, step: 0.01 * (4 - rank))
    again = train(PLAN, seconds=lambda rank, step: 0.01 * (4 - rank), replay=tmp_path / "first", run=tmp_path / "again")
    assert _same(first, again) and not _same(first, other)
    for shard in range(2):
        decisions = read_decisions(tmp_path / "first", 0, shard)
        assert decisions == read_decisions(tmp_path / "again", 0, shard)
        assert audit_arrival(decisions, 3, shard=shard) == []


def _same(first: Outcome, second: Outcome) -> bool:
    one, two = first.weights[0], second.weights[0]
    assert one is not None and two is not None
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_rank_that_dies_is_dropped_and_training_goes_on(tmp_path: Path) -> None:
    outcome = train(PLAN, faults=[Kill(2, after_seconds=0.1)], run=tmp_path)
    assert outcome.weights[2] is None
    again = train(PLAN, replay=tmp_path)
    assert _same(outcome, again)


def test_a_fast_rank_takes_more_of_the_work(tmp_path: Path) -> None:
    plan = "data=2 consistency=elastic(2) topology=server"
    train(plan, run=tmp_path, seconds=lambda rank, step: (0.01, 0.03)[rank], num_steps=24)
    visits = [d.pushes[0] for d in read_decisions(tmp_path, 0, 0) if isinstance(d, Commit)]
    assert sorted(stint for _, stint in visits) == list(range(24))
    assert 16 <= sum(rank == 0 for rank, _ in visits) <= 19


# ---- checkpoints


def test_a_checkpoint_holds_the_centre_and_a_resumed_run_begins_with_it() -> None:
    plan = parse_plan("data=2 consistency=elastic(2) topology=server(shards=2)")
    course = Course(plan)

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        if group.rank >= 2:
            return serve(mailbox, spec_of(course, group.rank - 2))
        replicas = ServedReplicas(mailbox, settings_of(plan, course.make_optimizer()), [0])
        parameters, optimizer = make_parameters(), course.make_optimizer()
        model = State(parameters, {}, torch.zeros(0))
        replicas.join(model)
        state = optimizer.init(parameters)
        for step in range(5):
            add = replicas.begin(0.5)
            for name, parameter in parameters.items():
                add(name, pull(parameter, group.rank, step))
            _, state = replicas.finish(0.0, Update(optimizer, parameters, state, LR, None))
        own = parameters["w1"].detach().clone()
        kept = dict(replicas.memory())
        assert replicas.collect(state) is state
        with replicas.use_consensus(model):
            assert torch.equal(parameters["w1"], kept["parameter/w1"].tensor)
        assert torch.equal(parameters["w1"], own) and not torch.equal(own, kept["parameter/w1"].tensor)
        for name, parameter in parameters.items():
            parameter.data.copy_(kept[f"parameter/{name}"].tensor if group.rank == 0 else 7.0 * torch.ones(()))
        replicas.remember(5, {"optimizer/step": Entry(state.shared.step)})
        found = parameters["w1"].detach().clone()
        return kept["parameter/w1"].tensor, found, replicas.next_step(5)

    (kept, first, step), (_, second, _), *_ = run_virtual(program, 4, timeout=1e6).results
    assert torch.equal(kept, first) and torch.equal(first, second)
    assert step == 5
