"""A small training through servers, on the virtual cluster: no model, so that it takes milliseconds."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from weft.distributed.consistency.server import (
    HostSpec,
    JoinPolicy,
    ReplayPolicy,
    ServedReplicas,
    ServerSpec,
    Settings,
    Summary,
    make_policy,
    serve,
    serve_host,
    settings_of,
)
from weft.distributed.consistency.server.decisions import read_decisions
from weft.distributed.group import AbstractGroup
from weft.distributed.group.faulty import Kill
from weft.distributed.mailbox import AbstractMailbox, FaultyMailbox, MailFault, RecordingMailbox, VirtualMailbox
from weft.distributed.virtual import TEN_GIGABIT, die, run_virtual
from weft.graph import State
from weft.planning.network import NetworkModel
from weft.simulation.place import with_host_servers
from weft.specs import Plan, parse_plan
from weft.training.optimizers import AbstractOptimizer, Momentum, Optimizer
from weft.training.replicas import Update

__all__ = [
    "Course",
    "host_spec_of",
    "make_parameters",
    "momentum",
    "pull",
    "reference",
    "serve_through_falls",
    "spec_of",
    "train",
    "work",
]

LR = 0.05


def make_parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"w1": (20, 16), "b1": (16,), "w2": (16, 9), "b2": (9,)}
    return {n: torch.randn(shape, generator=generator).requires_grad_() for n, shape in shapes.items()}


def pull(parameter: Tensor, share: int, step: int) -> Tensor:
    """A gradient: towards a target that is of the step and the share."""
    generator = torch.Generator().manual_seed(1000 * step + share)
    return parameter.detach() - torch.randn(parameter.shape, generator=generator)


def momentum() -> AbstractOptimizer:
    return Optimizer(Momentum(), lr=LR)


@dataclass(frozen=True)
class Course:
    """A training: `seconds(rank, step)` is what a step takes in virtual time; faults are planted by spoilt settings.

    `falls` are the moments at which a server, given by its address, dies, and the seconds until it is started again,
    from what it left in the folder `kept`.
    """

    plan: Plan
    num_steps: int = 12
    seconds: Callable[[int, int], float] = lambda rank, step: 0.01 * (1 + rank)
    make_optimizer: Callable[[], AbstractOptimizer] = momentum
    faults: Sequence[MailFault] = field(default_factory=tuple)
    falls: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    kept: Path | None = None
    run: Path | None = None
    replay: Path | None = None
    clip_norm: float | None = None
    network: NetworkModel = TEN_GIGABIT
    spoil_worker: Callable[[Settings], Settings] = lambda settings: settings
    spoil_server: Callable[[Settings], Settings] = lambda settings: settings


def work(replicas: ServedReplicas, course: Course, charge: Callable[[float], None]) -> dict[str, Tensor]:
    """What the loop does, in few lines; the weights that all ended with."""
    parameters, step = make_parameters(), 0
    if replicas.mesh.rank:
        for parameter in parameters.values():
            parameter.data.fill_(7.0)  # a rank that does not take rank 0's weights is found out
    replicas.join(State(parameters, {}, torch.zeros(0)))
    optimizer = course.make_optimizer()
    state = optimizer.init(parameters)
    while (step := replicas.next_step(step)) < course.num_steps:
        add = replicas.begin(1 / replicas.mesh.num_replicas)
        share = int(replicas.share(torch.arange(replicas.mesh.num_replicas)))
        for name in reversed(parameters):
            charge(course.seconds(replicas.mesh.rank, step) / len(parameters))
            add(name, pull(parameters[name], share, step))
        _, state = replicas.finish(0.0, Update(optimizer, parameters, state, LR, course.clip_norm))
        step += 1
        if replicas.agree_to_stop(False):
            break
    replicas.sum(torch.ones(1))
    with replicas.use_consensus(State(parameters, {}, torch.zeros(0))):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def spec_of(course: Course, shard: int, kept: Path | None = None) -> ServerSpec:
    plan = course.plan
    settings = course.spoil_server(settings_of(plan, course.make_optimizer(), course.clip_norm))
    script = read_decisions(course.replay, 0, shard) if course.replay else None
    return ServerSpec(
        shard=shard,
        plan=str(plan),
        settings=settings,
        make_policy=lambda _seed, is_fresh: (
            ReplayPolicy(script)
            if script is not None
            else make_policy(plan.consistency, plan.num_ranks, is_fresh=is_fresh)
        ),
        make_optimizer=lambda _fraction: course.make_optimizer(),
        run=course.run,
        snapshot=kept,
    )


def host_spec_of(course: Course, host: int, kept: Path | None = None) -> HostSpec:
    plan = course.plan
    script = read_decisions(course.replay, 0, host, "host") if course.replay else None
    return HostSpec(
        host=host,
        plan=str(plan),
        settings=settings_of(plan, course.make_optimizer()),
        make_policy=lambda _seed: JoinPolicy(script),
        run=course.run,
        begun=kept,
    )


@dataclass(frozen=True)
class Outcome:
    """The weights of every worker (None of one that died), what the servers did, and what all sent."""

    weights: list[dict[str, Tensor] | None]
    servers: list[Summary]
    mailboxes: list[RecordingMailbox]
    seconds: float


class _FallError(BaseException):
    """A server dies, and its host lives on."""


def _fall() -> NoReturn:
    raise _FallError


def serve_through_falls(group: AbstractGroup, course: Course) -> tuple[Summary, RecordingMailbox]:
    """The server of this address, in its second life if it is to fall; what it did, and its mailbox."""
    number, num_shards = group.rank - course.plan.num_ranks, int(course.plan.topology["shards"])
    kept = course.kept / f"server-{number}" if course.kept is not None else None

    def live(mailbox: AbstractMailbox) -> Summary:
        if number < num_shards:
            return serve(mailbox, spec_of(course, number, kept))
        return serve_host(mailbox, host_spec_of(course, number - num_shards, kept))

    if group.rank in course.falls:
        moment, seconds = course.falls[group.rank]
        doomed = FaultyMailbox(VirtualMailbox(group), [Kill(group.rank, after_seconds=moment)], die=_fall)
        try:
            live(doomed)
            raise AssertionError("the training ended before the fall")
        except _FallError:
            doomed.close()
            group.clock.wait_until(group.clock.now() + seconds)
    mailbox = RecordingMailbox(FaultyMailbox(VirtualMailbox(group), course.faults, die=die))
    return live(mailbox), mailbox


def train(text: str, course: Course | None = None, **options: object) -> Outcome:
    """Carry a plan out on virtual workers and servers."""
    plan = parse_plan(text)
    course = course or Course(plan, **options)  # type: ignore[arg-type]
    mailboxes: dict[int, RecordingMailbox] = {}

    def program(group: AbstractGroup) -> object:
        if group.rank >= plan.num_ranks:
            summary, mailboxes[group.rank] = serve_through_falls(group, course)
            return summary
        faulty: AbstractMailbox = FaultyMailbox(VirtualMailbox(group), course.faults, die=die)
        mailboxes[group.rank] = mailbox = RecordingMailbox(faulty)
        settings = course.spoil_worker(settings_of(plan, course.make_optimizer(), course.clip_norm))
        return work(ServedReplicas(mailbox, settings, [0]), course, group.clock.charge)

    found = run_virtual(program, plan.roles.num_addresses, network=with_host_servers(course.network, plan), timeout=1e6)
    size = plan.num_ranks
    ordered = [mailboxes[rank] for rank in sorted(mailboxes)]
    return Outcome(list(found.results[:size]), list(found.results[size:]), ordered, max(found.seconds))


def reference(num_ranks: int, num_steps: int, make_optimizer: Callable[[], AbstractOptimizer]) -> dict[str, Tensor]:
    """The synchronous training, in one process: the weighted sum in the order of ranks, one update for each step."""
    parameters, optimizer = make_parameters(), make_optimizer()
    state = optimizer.init(parameters)
    for step in range(num_steps):
        total = {n: pull(p, 0, step) * (1 / num_ranks) for n, p in parameters.items()}
        for rank in range(1, num_ranks):
            for name, parameter in parameters.items():
                total[name] += pull(parameter, rank, step) * (1 / num_ranks)
        state = optimizer.update(total, parameters, state, LR)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def work_with_a_pause(replicas: ServedReplicas, course: Course, gate: threading.Barrier) -> dict[str, Tensor]:
    """Six steps, with a halt after the third in which the test may end a server; the weights that it ended with."""
    parameters, optimizer = make_parameters(), course.make_optimizer()
    replicas.join(State(parameters, {}, torch.zeros(0)))
    state = optimizer.init(parameters)
    for turn in range(6):
        if turn == 3:
            gate.wait()
            gate.wait()
        add = replicas.begin(0.5)
        for name, parameter in parameters.items():
            add(name, parameter.detach().clone())
        _, state = replicas.finish(0.0, Update(optimizer, parameters, state, 0.05, None))
    replicas.sum(torch.zeros(1))
    with replicas.use_consensus(State(parameters, {}, torch.zeros(0))):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}
