"""Servers that die and are restored on the virtual cluster: in every scheme, and at every moment of a training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.consistency.server.served import (
    LR,
    Course,
    make_parameters,
    momentum,
    pull,
    reference,
    serve_through_falls,
    train,
)
from weft.distributed.consistency.server import ServedReplicas, settings_of
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import VirtualMailbox
from weft.distributed.virtual import run_virtual
from weft.errors import PeerLostError
from weft.graph import State
from weft.specs import parse_plan
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Update

SCHEMES = {
    "async": "async",
    "difference": "async(push=difference)",
    "parts": "async(parts=2)",
    "stale by arrival": "stale(1,commit=arrival)",
    "in step by arrival": "stale(0,commit=arrival)",
    "stale by clock": "stale(1)",
    "in step": "stale(0)",
    "backup": "backup(1)",
    "elastic": "elastic(2)",
}
RANKS = 3


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_training_goes_on_with_a_restored_shard(scheme: str, shard: int, tmp_path: Path) -> None:
    """Ranks differ in speed: some wait at the other shard when it dies, some are within a step. One whose push was lost
    once waited for an answer to it for ever."""
    text = f"data={RANKS} consistency={scheme} topology=server(shards=2)"
    for number, (moment, seconds) in enumerate(((0.0301, 0.0005), (0.0455, 0.0005), (0.0602, 0.05))):
        kept = tmp_path / str(number)
        kept.mkdir()
        outcome = train(text, falls={RANKS + shard: (moment, seconds)}, kept=kept, num_steps=6)
        first, *others = outcome.weights
        assert first is not None and all(torch.isfinite(tensor).all() for tensor in first.values())
        assert all(other is not None and torch.equal(first["w1"], other["w1"]) for other in others)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_ranks_that_died_before_do_not_hold_up_a_restored_shard(scheme: str, tmp_path: Path) -> None:
    """Its clock, at zero, was once the slowest for ever. That it died is known after a second."""
    text = f"data={RANKS} consistency={scheme} topology=server(shards=1,place=own)"
    outcome = train(
        text,
        seconds=lambda rank, step: 0.2,
        faults=[Kill(2, after_seconds=0.1)],
        falls={RANKS: (1.2, 0.01)},
        kept=tmp_path,
    )
    assert [weights is None for weights in outcome.weights] == [False, False, True]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_ranks_that_have_ended_do_not_hold_up_a_restored_shard(scheme: str, tmp_path: Path) -> None:
    """Rank 2 is slow in its last step: the others have ended, and wait at shard 0, when it dies."""
    text = f"data={RANKS} consistency={scheme} topology=server(shards=2)"

    def seconds(rank: int, step: int) -> float:
        return 0.01 if step < 5 or rank < 2 else 0.5

    outcome = train(text, falls={RANKS: (0.3, 0.05)}, kept=tmp_path, num_steps=6, seconds=seconds)
    assert all(weights is not None for weights in outcome.weights)


@pytest.mark.parametrize("moment", [0.00001, 0.00005, 0.0001, 0.0002])
def test_a_shard_that_dies_at_the_beginning_is_begun_with_again(moment: float, tmp_path: Path) -> None:
    """Before rank 0's weights are there, which it sends again, or before all ranks have had them."""
    text = "data=2 consistency=stale(0) topology=server(shards=2,place=own)"
    first, second = train(text, falls={3: (moment, 0.01)}, kept=tmp_path, num_steps=4).weights
    assert first is not None and second is not None and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("victim", [5, 6, 7, 8], ids=["shard 0", "shard 1", "host server 0", "host server 1"])
@pytest.mark.parametrize("scheme", ["async", "stale(0,commit=arrival)", "stale(1,commit=arrival)"])
def test_training_goes_on_behind_host_servers(scheme: str, victim: int, tmp_path: Path) -> None:
    """Ranks that a bound held back at the shard that dies are asked for anew by their host server."""
    text = f"data=5 consistency={scheme} topology=server(shards=2,place=own,inner=3)"
    for number, (moment, seconds) in enumerate(((0.0301, 0.0005), (0.0455, 0.0005), (0.0602, 0.05), (0.0707, 0.01))):
        kept = tmp_path / str(number)
        kept.mkdir()
        outcome = train(text, falls={victim: (moment, seconds)}, kept=kept, num_steps=6)
        assert all(weights is not None for weights in outcome.weights)


def test_a_host_server_that_is_restored_after_its_ranks_have_ended_ends(tmp_path: Path) -> None:
    """Ranks 0 and 1 have ended when it dies, and rank 2, of the other host, when it is back."""
    text = "data=3 consistency=async topology=server(shards=1,place=own,inner=2)"

    def seconds(rank: int, step: int) -> float:
        return 0.01 if step < 5 or rank < 2 else 0.5

    outcome = train(text, falls={4: (0.3, 3.0)}, kept=tmp_path, num_steps=6, seconds=seconds)
    assert all(weights is not None for weights in outcome.weights)


def test_a_server_that_does_not_come_back_is_named(tmp_path: Path) -> None:
    text = "data=2 consistency=async topology=server(shards=2)"
    with pytest.raises(PeerLostError, match=r"none came in its place \(peer: 3, waited: 60 s\)"):
        train(text, falls={3: (0.05, 100.0)}, kept=tmp_path)


# Questions beside the steps: shard 0 dies at 1.0 and is back at 1.5.

Question = Callable[[ServedReplicas, OptimizerState, State, Callable[[float], None]], Any]


def ask(question: Question, folder: Path, num_steps: int = 3) -> tuple[Any, ...]:
    """Two ranks take some steps within a second; then each has the question."""
    plan = parse_plan("data=2 consistency=stale(0) topology=server(shards=2,place=own)")
    course = Course(plan, falls={2: (1.0, 0.5)}, kept=folder)

    def program(group: AbstractGroup) -> Any:
        if group.rank >= 2:
            return serve_through_falls(group, course)[0]
        optimizer, parameters = course.make_optimizer(), make_parameters()
        replicas = ServedReplicas(VirtualMailbox(group), settings_of(plan, optimizer), [0])
        model = State(parameters, {}, torch.zeros(0))
        replicas.join(model)
        state = optimizer.init(parameters)
        for step in range(num_steps):
            add = replicas.begin(0.5)
            for name, parameter in parameters.items():
                add(name, pull(parameter, replicas.mesh.rank, step))
            _, state = replicas.finish(0.0, Update(optimizer, parameters, state, LR, None))
        found = question(replicas, state, model, group.clock.wait_until)
        replicas.sum(torch.zeros(1))
        return found

    return run_virtual(program, 4, timeout=1e6).results


@pytest.mark.parametrize("moment", [1.2, 2.0], ids=["away", "back"])
def test_a_checkpoint_waits_for_the_state_of_a_restored_shard(moment: float, tmp_path: Path) -> None:
    def collect(replicas: ServedReplicas, state: OptimizerState, _model: State, wait: Callable[[float], None]) -> Any:
        wait(moment)
        return replicas.collect(state)

    collected, *_ = ask(collect, tmp_path)
    assert collected.slots.keys() == make_parameters().keys()
    assert all(own["velocity"].shape == make_parameters()[name].shape for name, own in collected.slots.items())


@pytest.mark.parametrize("moments", [(0.5, 2.0), (1.2, 1.2), (2.0, 0.5)])
def test_a_sum_is_given_again_to_a_restored_shard(moments: tuple[float, float], tmp_path: Path) -> None:
    def add(replicas: ServedReplicas, _state: OptimizerState, _model: State, wait: Callable[[float], None]) -> Any:
        wait(moments[replicas.mesh.rank])
        return replicas.sum(torch.tensor([1.0 + replicas.mesh.rank])).item()

    assert ask(add, tmp_path)[:2] == (3.0, 3.0)


def test_the_last_weights_are_asked_of_a_restored_shard(tmp_path: Path) -> None:
    """When all had ended it was snapped: nothing is lost."""

    def take(replicas: ServedReplicas, _state: OptimizerState, model: State, wait: Callable[[float], None]) -> Any:
        replicas.sum(torch.zeros(1))
        wait(1.2)
        with replicas.use_consensus(model):
            return {name: parameter.detach().clone() for name, parameter in model.parameters.items()}

    expected = reference(2, 3, momentum)
    for found in ask(take, tmp_path)[:2]:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_wish_to_stop_that_died_with_a_shard_is_told_to_its_heir(tmp_path: Path) -> None:
    """Rank 0 has all stop; the message is under way when shard 0 dies."""

    def stop(replicas: ServedReplicas, state: OptimizerState, model: State, wait: Callable[[float], None]) -> Any:
        if replicas.mesh.rank == 0:
            wait(0.99999)
            replicas.dismiss()
            replicas.sum(torch.zeros(1))
            return None
        wait(2.0)
        add = replicas.begin(0.5)
        for name, parameter in model.parameters.items():
            add(name, parameter.detach().clone())
        replicas.finish(0.0, Update(Course(parse_plan("data=1")).make_optimizer(), model.parameters, state, LR, None))
        return replicas.agree_to_stop(False)

    assert ask(stop, tmp_path)[1] is True
