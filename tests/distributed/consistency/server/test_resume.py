"""What a checkpoint gets from the servers, and servers that begin with it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.consistency.server.served import LR, Course, make_parameters, pull, reference, spec_of
from weft.distributed.consistency.server import ServedReplicas, serve, settings_of
from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import VirtualMailbox
from weft.distributed.virtual import run_virtual
from weft.graph import State
from weft.specs import parse_plan
from weft.training.checkpoint import Entry
from weft.training.optimizers import Adam, Optimizer, OptimizerState
from weft.training.replicas import Update

PLAN = parse_plan("data=2 consistency=stale(0) topology=server(shards=2)")


def make_adam() -> Optimizer:
    return Optimizer(Adam(), lr=LR)


COURSE = Course(PLAN, make_optimizer=make_adam)


def take_steps(replicas: ServedReplicas, parameters: dict[str, torch.Tensor], steps: range) -> OptimizerState:
    optimizer = make_adam()
    state = optimizer.init(parameters)
    for step in steps:
        assert replicas.next_step(step) == step
        add = replicas.begin(0.5)
        for name, parameter in parameters.items():
            add(name, pull(parameter, replicas.mesh.rank, step))
        _, state = replicas.finish(0.0, Update(optimizer, parameters, state, LR, None))
    return replicas.collect(state)


def as_entries(state: OptimizerState) -> dict[str, Entry]:
    slots = {f"slot/{n}/{slot}": Entry(t, "mean") for n, own in state.slots.items() for slot, t in own.items()}
    return {**slots, "optimizer/step": Entry(state.shared.step)}


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_stopped(is_faulty: bool) -> None:
    """The planted fault is a checkpoint without the servers' moments."""

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        if group.rank >= 2:
            return serve(mailbox, spec_of(COURSE, group.rank - 2))
        replicas = ServedReplicas(mailbox, settings_of(PLAN, make_adam()), [0])
        parameters = make_parameters()
        model = State(parameters, {}, torch.zeros(0))
        replicas.join(model)
        state = take_steps(replicas, parameters, range(6))
        entries = as_entries(make_adam().init(parameters) if is_faulty else state)
        replicas.remember(6, entries)
        take_steps(replicas, parameters, range(6, 12))
        replicas.sum(torch.zeros(1))
        with replicas.use_consensus(model) as consensus:
            assert (consensus.judges is None) == (group.rank == 1)
            return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    found = run_virtual(program, 4, timeout=1e6).results[0]
    expected = reference(2, 12, make_adam)
    assert all(torch.equal(found[name], expected[name]) for name in expected) != is_faulty


def test_ranks_that_do_not_meet_give_their_own() -> None:
    mailbox: Any = SimpleNamespace(address=0)
    replicas = ServedReplicas(mailbox, settings_of(PLAN, make_adam()), [0])
    assert len(replicas.gather(torch.ones(2))) == 1
    assert not replicas.is_synchronous and not replicas.memory()
