"""Samples that differ in how many targets they have: relaxed ranks weigh them as synchronous ranks do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.cases import trace as trace_case
from tests.distributed.consistency.server.served import Course, spec_of
from tests.proving.test_lockstep import case_of, with_settings
from tests.training.planted import ignore
from weft.distributed.consistency.server import ServedReplicas, serve, settings_of
from weft.distributed.consistency.server.decisions import read_decisions
from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import VirtualMailbox
from weft.distributed.virtual import run_virtual
from weft.graph import relative_error
from weft.proving.lockstep import Lockstep, compare_ranks, trace_ranks, trace_references
from weft.proving.method import Case
from weft.proving.proof import Trace, copy_of
from weft.proving.served import hold_to_equations
from weft.recipes import pydoc_lstm
from weft.specs import IGNORED, parse_plan
from weft.training.build import build_splits, build_task
from weft.training.component import Component
from weft.training.datasets import ArrayDataset, Splits, splits_from_arrays
from weft.training.loop import train
from weft.training.optimizers import SGD, Optimizer
from weft.training.recipe import Fixed, Mutable, Recipe

STEPS = 3
RECIPE = Recipe(
    "arrays",
    "",
    Fixed(Component("mlp", hidden=4), Component("arrays", path=""), Component("cross_entropy"), epochs=1),
    Mutable(batch_size=12, optimizer=Component("sgd", lr=0.1), sampler=Component("ordered")),
)


def make_splits(num_ignored: int = 15) -> Splits:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    y[torch.randperm(40, generator=generator)[:num_ignored]] = IGNORED
    return splits_from_arrays(x, y, x[:5], y[20:25].clamp(0), x[5:9], y[30:34].clamp(0))


def trace(consistency: str, splits: Splits, num_steps: int = STEPS) -> list[Trace]:
    return trace_case(case_of(RECIPE, f"data=3 consistency={consistency}", num_steps, splits))


def one_rank(splits: Splits) -> Trace:
    return trace_references(case_of(RECIPE, "data=3", STEPS, splits))[0]


def largest_error(found: Trace, expected: Trace) -> float:
    """Of all that both have traced: synchronous ranks also trace the loss and the gradients."""
    pairs = [(one[name], two[name]) for one, two in zip(found, expected, strict=True) for name in one.keys() & two]
    return max(relative_error(*pair)[0] for pair in pairs)


def test_a_meeting_after_every_step_is_the_synchronous_run() -> None:
    # Regression: ranks that do not meet in every step weighed by samples.
    splits = make_splits()
    expected = one_rank(splits)
    assert largest_error(trace("sync", splits)[0], expected) == 0
    assert largest_error(trace("local(1)", splits)[0], expected) < 1e-6
    first, *_ = trace("local(2,after=2)", splits)
    assert largest_error(first[:1], expected[:1]) == 0  # the last synchronous step, from which it is traced


@pytest.mark.parametrize("consistency", ["local(2)", "gossip(ring)", "elastic(2)"])
def test_ranks_follow_the_equations(consistency: str) -> None:
    plan = parse_plan(f"data=3 consistency={consistency}")
    case = case_of(RECIPE, str(plan), Lockstep().steps_needed(plan, 3), make_splits())
    proof = compare_ranks(trace_case(case), trace_references(case), case)
    assert proof.passed, proof.finding


def test_a_batch_without_targets_leaves_the_weights_where_they_are() -> None:
    splits = make_splits(num_ignored=40)
    assert largest_error(trace("local(1)", splits)[0], one_rank(splits)) < 1e-6


@pytest.mark.parametrize("consistency", ["stale(0)", "backup(0)"])
def test_rounds_at_servers_are_the_synchronous_run_to_the_last_bit(consistency: str) -> None:
    splits, plan = make_splits(), parse_plan(f"data=3 consistency={consistency} topology=server(shards=2)")
    sgd = Optimizer(SGD(), lr=0.1)

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        if group.rank >= 3:
            return serve(mailbox, spec_of(Course(plan, make_optimizer=lambda: sgd), group.rank - 3))
        replicas = ServedReplicas(mailbox, settings_of(plan, sgd), [0])
        found = trace_ranks(case_of(RECIPE, str(plan), STEPS, splits), replicas)
        replicas.sum(torch.zeros(1))
        return found

    found = run_virtual(program, 5, timeout=1e6).results[0]
    assert largest_error(found, one_rank(splits)) == 0


@pytest.mark.parametrize("consistency", ["async(share)", "stale(1)"])
def test_servers_follow_the_equations_of_their_records(consistency: str, tmp_path: Path) -> None:
    splits, plan = make_splits(), parse_plan(f"data=3 consistency={consistency} topology=server")
    sgd = Optimizer(SGD(), lr=0.1)

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        if group.rank == 3:
            return serve(mailbox, spec_of(Course(plan, make_optimizer=lambda: sgd, run=tmp_path), 0))
        replicas = ServedReplicas(mailbox, settings_of(plan, sgd), [0])
        task, state = build_task(RECIPE, splits, 0, replicas)
        replicas.join(state.model)
        state, _ = train(task, state, emit=ignore, save=ignore)
        replicas.sum(torch.zeros(1))
        with replicas.use_consensus(state.model):
            return copy_of(state.model.parameters, state.optimizer)

    found = run_virtual(program, 4, timeout=1e6).results[0]
    case = Case(RECIPE.with_setting("plan", str(plan)), splits, 0, STEPS)
    proof = hold_to_equations(case, [read_decisions(tmp_path, 0, 0)], found)
    assert proof.passed and proof.is_bitwise, proof.finding


def topics() -> Splits:
    return build_splits(with_settings(pydoc_lstm(), data="pydoc_topics", data__max_length=24))


@pytest.mark.parametrize("make", [make_splits, topics])
@pytest.mark.parametrize("indices", [torch.tensor([3, 0, 7, 20]), torch.tensor([], dtype=torch.int64)])
def test_targets_are_counted_as_in_a_batch(make: Any, indices: Tensor) -> None:
    data = make().train
    assert data.has_padding() and data.num_targets(indices) == data.take(indices).num_targets


def test_numbers_are_counted_by_samples() -> None:
    data = ArrayDataset(torch.ones(5, 2), torch.ones(5, 3))
    assert not data.has_padding() and data.num_targets(torch.tensor([1, 2])) == 2
