"""Small trainings in pairs on the virtual cluster: without a model, or of one that takes milliseconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.distributed.consistency.server.served import LR, make_parameters, momentum, pull
from tests.distributed.virtual_plan import run_plan
from weft.distributed.consistency.pairs import Event, GossipReplicas, read_journals
from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import MailFault, RecordingMailbox
from weft.distributed.realise import RunSpec
from weft.graph import State
from weft.specs import Plan, parse_plan
from weft.training.optimizers import AbstractOptimizer
from weft.training.replicas import Update

T = TypeVar("T")
Weights = dict[str, Tensor]

__all__ = ["Course", "Outcome", "journals_of", "run_pairs", "train"]


@dataclass(frozen=True)
class Course:
    """A training of `num_steps` batches: `seconds(rank, turn)` is what a turn takes in virtual time."""

    size: int = 4
    graph: str = "ring"
    mix: str = "pair"
    num_steps: int = 12
    seconds: Callable[[int, int], float] = lambda rank, turn: 0.01 * (1 + rank)
    make_optimizer: Callable[[], AbstractOptimizer] = momentum
    faults: Sequence[MailFault] = field(default_factory=tuple)
    run: Path | None = None
    replay: Path | None = None
    compress: str = "none"


@dataclass(frozen=True)
class Outcome:
    """The weights of every worker (None of one that died), the mean and what is known of it, and what all sent."""

    weights: list[dict[str, Tensor] | None]
    mean: dict[str, Tensor]
    values: dict[str, float]
    turns: list[int]
    mailboxes: dict[int, RecordingMailbox]
    seconds: float


def run_pairs(
    plan: Plan,
    work: Callable[[AbstractGroup, GossipReplicas], T],
    faults: Sequence[MailFault] = (),
    *,
    run: Path | None = None,
    replay: Path | None = None,
) -> tuple[list[T | None], dict[int, RecordingMailbox], float]:
    """Workers and responders as virtual ranks; the death of a rank is also that of its responder."""
    mailboxes: dict[int, RecordingMailbox] = {}
    result = run_plan(plan, work, spec=RunSpec(run=run, replay=replay), faults=faults, mailboxes=mailboxes)
    return list(result.results[: plan.num_ranks]), mailboxes, max(result.seconds)


def train(course: Course) -> Outcome:
    consistency = f"gossip({course.graph},mix={course.mix},lost=drop)"
    plan = parse_plan(f"data={course.size} consistency={consistency} compress={course.compress}")

    def work(group: AbstractGroup, replicas: GossipReplicas) -> tuple[Weights, Weights, dict[str, Any]]:
        """What the loop does, in few lines."""
        parameters, step, turn = make_parameters(), 0, 0
        model = State(parameters, {}, torch.zeros(0))
        if replicas.mesh.rank:
            for parameter in parameters.values():
                parameter.data.fill_(7.0)  # a rank that does not take rank 0's weights is found out
        replicas.join(model)
        optimizer = course.make_optimizer()
        state = optimizer.init(parameters)
        while (step := replicas.next_step(step)) < course.num_steps:
            add = replicas.begin(1 / replicas.mesh.num_replicas)
            share = int(replicas.share(torch.arange(replicas.mesh.num_replicas)))
            for name in reversed(parameters):
                group.clock.charge(course.seconds(replicas.mesh.rank, turn) / len(parameters))
                add(name, pull(parameters[name], share, step))
            _, state = replicas.finish(0.0, Update(optimizer, parameters, state, LR, None))
            step, turn = step + 1, turn + 1
            if replicas.agree_to_stop(False):
                break
        own = copy(parameters)
        replicas.sum(torch.ones(1))
        with replicas.use_consensus(model) as consensus:
            return own, copy(parameters), {**consensus.values, "turns": float(turn)}

    found, mailboxes, seconds = run_pairs(plan, work, course.faults, run=course.run, replay=course.replay)
    assert found[0] is not None
    turns = [0 if own is None else int(own[2].pop("turns")) for own in found]
    weights = [None if own is None else own[0] for own in found]
    return Outcome(weights, found[0][1], found[0][2], turns, mailboxes, seconds)


def copy(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def journals_of(run: Path, size: int) -> list[list[Event]]:
    return read_journals(run, 0, size)
