"""Consistencies over replicas that are several ranks: each part of the model keeps it by itself, in step with the
others."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.consistency.server.session import Session
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import SlowLink
from weft.distributed.mailbox import MailFault
from weft.distributed.placement.inside import InsideReplica
from weft.distributed.placement.pipeline.placement import Pipeline
from weft.distributed.realise import RunSpec
from weft.errors import TrainingError
from weft.proving.lockstep import Lockstep, compare_ranks, trace_ranks, trace_references
from weft.proving.method import Case, Evidence
from weft.proving.own_pace import train_to_the_end
from weft.proving.proof import Proof
from weft.proving.served import Served, trace_end
from weft.specs import Plan
from weft.training.events import Event, StepStarted
from weft.training.gradients import joint_norm
from weft.training.replicas import AbstractReplicas


def prove(plan: str, **settings: object) -> Proof:
    case = case_of(small_mlp(**settings), plan, 1)
    case = case_of(small_mlp(**settings), plan, Lockstep().steps_needed(case.plan, 3))
    spec = RunSpec.of(case.recipe, (0,))
    size = case.plan.num_ranks
    traces = run_plan(case.plan, lambda _group, replicas: trace_ranks(case, replicas), spec=spec).results[:size]
    references = trace_references(case)
    return compare_ranks(list(traces), [references[case.plan.mesh(rank).replica] for rank in range(size)], case)


@pytest.mark.parametrize(
    "consistency",
    [
        "sync",
        "local(2)",
        "local(2,state=mean,outer=nesterov)",
        "local(2,after=2)",
        "elastic(2)",
        "gossip",
        "gossip(mix=after)",
    ],
)
@pytest.mark.parametrize("split", ["pipeline=2", "tensor=2 compress=bf16"])
def test_replicas_of_two_ranks_follow_their_consistency(split: str, consistency: str) -> None:
    proof = prove(f"data=2 {split} consistency={consistency}", clip_norm=0.1)
    assert proof.passed, proof.finding


@pytest.mark.parametrize("topology", ["server(1)", "server(2,own)"])
@pytest.mark.parametrize("split", ["pipeline=2", "tensor=2 compress=bf16"])
def test_synchronous_servers_of_each_part(split: str, topology: str) -> None:
    proof = prove(f"data=2 {split} topology={topology}")
    assert proof.passed, proof.finding


def prove_served(plan: str, tmp_path: Path, num_batches: int = 4, **settings: object) -> Proof:
    """Some batches on virtual ranks, of which those of the last replica are slow at first, and those of the first
    later on; and again by the record, at another pace."""
    case, method = case_of(small_mlp(**settings), plan, num_batches), Served()
    # In 64 bits: with rounding, an activation that is all but zero falls on the other side of it.
    case = replace(case, num_steps=method.steps_needed(case.plan, num_batches), dtype=torch.float64, tolerance=1e-9)
    runs: list[Evidence] = []
    for number in range(method.num_runs):
        run = tmp_path / f"run-{number}"
        spec = RunSpec.of(case.recipe, (0,), run=run, replay=runs[0].folder if runs else None)
        late = slow_links(case.plan) if number == 0 else ()
        found = run_plan(case.plan, partial(trace_at_pace, case, number), spec=spec, faults=late).results
        runs.append(Evidence(list(found[: case.plan.num_ranks]), run))
    return method.judge(case, runs)


def slow_links(plan: Plan) -> list[MailFault]:
    """The servers of part 0 hear replica 0 late, those of part 1 replica 1: they see the pushes in other orders."""
    mesh, links = plan.mesh(0), list[MailFault]()
    for server in range(plan.num_servers):
        part = server // plan.num_shards
        links.append(SlowLink(mesh.holders_of(part)[part], plan.num_ranks + server, seconds=0.004))
    return links


def trace_at_pace(case: Case, number: int, group: AbstractGroup, replicas: AbstractReplicas) -> dict[str, Tensor]:
    mesh = replicas.mesh

    def pace(event: Event) -> None:
        if isinstance(event, StepStarted):
            is_slow = mesh.replica == (0 if event.progress.step > 2 else mesh.num_replicas - 1)
            group.clock.charge(0.001 * (1 + mesh.part) * (5 if is_slow and number == 0 else 1))

    state, _ = train_to_the_end(case, replicas, pace)
    return trace_end(case, replicas, state)


@pytest.mark.parametrize("split", ["pipeline=2", "tensor=2"])
@pytest.mark.parametrize(
    "consistency",
    [
        "async",
        "async(push=difference)",
        "async(staleness)",
        "stale(1)",
        "stale(1,commit=arrival)",
        "backup(1)",
        "elastic(2)",
    ],
)
def test_servers_of_each_part_do_what_they_recorded(split: str, consistency: str, tmp_path: Path) -> None:
    plan = f"data=3 {split} consistency={consistency} topology=server(2)"
    proof = prove_served(plan, tmp_path, model__dropout=0.2)
    assert proof.passed, proof.finding


def agree_alone(session: Session) -> None:
    """A rank that goes on where its own servers say."""


def hand_round_nothing(inside: InsideReplica, tensors: Mapping[str, Tensor]) -> None:
    """Ranks that each keep what their own servers make of a parameter that all of them hold."""


def speak_always(inside: InsideReplica, name: str) -> bool:
    return True


def test_ranks_of_a_replica_that_take_different_steps_are_caught(tmp_path: Path) -> None:
    with mock.patch.object(Session, "agree", agree_alone), pytest.raises(TrainingError, match="ranks wait for each"):
        prove_served("data=3 tensor=2 consistency=async topology=server(1)", tmp_path)


def test_parameters_that_servers_of_two_parts_update_each_by_itself_are_caught(tmp_path: Path) -> None:
    keep_apart = mock.patch.multiple(InsideReplica, hand_round=hand_round_nothing, speaks_for=speak_always)
    with keep_apart:
        proof = prove_served("data=3 tensor=2 consistency=async topology=server(1)", tmp_path)
    assert not proof.passed


def test_a_replica_that_steps_with_the_norm_of_one_part_is_caught() -> None:
    with mock.patch.object(Pipeline, "norm", lambda placement, norms: joint_norm(norms)):
        assert not prove("data=2 pipeline=2 consistency=local(2)", clip_norm=0.05).passed
