"""Every row of the costs of plans, held against what recording wrappers and the virtual clock counted."""

import gc
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.virtual_plan import run_plan
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.collectives import AlgorithmChoice, MessageGroup
from weft.distributed.group import AbstractGroup, AbstractWork, RecordingGroup
from weft.distributed.group.clock import AbstractClock
from weft.distributed.mailbox import AbstractMailbox, RecordingMailbox
from weft.distributed.place.topology import algorithm_of
from weft.distributed.placement import MeshGroups
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import TEN_GIGABIT, run_virtual
from weft.graph import State
from weft.planning.cluster import Link
from weft.planning.collective_cost import all_reduce_cost
from weft.planning.cost import CommunicationCost
from weft.planning.network import NetworkModel
from weft.planning.plan_cost import algorithm_of as find_algorithm
from weft.planning.plan_cost import plan_cost
from weft.specs import Plan, parse_plan
from weft.specs.axes import AXES
from weft.training.optimizers import Momentum, Optimizer
from weft.training.replicas import AbstractReplicas, Update

NUM_BYTES = 512
SIZES = (64, 16, 16, 8, 8, 8, 8)  # which two shards, that are cut at multiples of 64, have in equal parts
NUM_TENSORS = 7  # so that 8 ranks divide the report of the loss, of a number for each and one more
SPAN = 12  # steps between two counts: whole rounds of every scheme below
TAGS = {"part", "push", "forward", "weights", "ask", "paired"}  # under which gradients and weights travel

GROUPS = [
    "data=4",
    "data=4 topology=direct",
    "data=4 topology=ring",
    "data=4 topology=tree",
    "data=6 topology=tree",
    "data=4 topology=halving_doubling",
    "data=4 topology=hierarchical(2)",
    "data=8 topology=hierarchical(4,halving)",
    "shard=2",
    "data=2 shard=2",
    "data=4 compress=bf16",
    "shard=2 compress=bf16",
    "data=4 consistency=local(2) compress=fp16",
    "data=4 consistency=gossip(ring) compress=bf16",
    "data=4 consistency=elastic(3) compress=bf16",
    "data=4 consistency=local(4)",
    "data=4 consistency=local(3,state=mean)",
    "data=4 consistency=local(2,outer=nesterov) topology=tree",
    "data=4 consistency=gossip(ring)",
    "data=4 consistency=gossip(torus)",
    "data=4 consistency=gossip(exponential,mix=after)",
    "data=4 consistency=gossip(complete)",
    "data=2 consistency=elastic(1)",
    "data=4 consistency=elastic(3)",
]
MAILBOXES = [
    "data=4 topology=server",
    "data=4 topology=server(2)",
    "data=4 topology=server(2,place=own)",
    "data=4 consistency=async topology=server",
    "data=4 consistency=async(parts=2) topology=server(2)",
    "data=4 consistency=stale(2) topology=server(2)",
    "data=4 consistency=stale(2,arrival) topology=server",
    "data=4 consistency=async topology=server(2) compress=bf16",
    "data=4 consistency=backup(1) topology=server(2)",
    "data=4 consistency=elastic(3) topology=server(2)",
    "data=4 consistency=async topology=server(2,inner=2)",
    "data=4 consistency=gossip(ring,lost=drop)",
]
CODED = [
    "data=4 compress=qsgd(8)",
    "data=4 compress=onebit",
    "data=4 compress=terngrad",
    "data=4 compress=topk(0.1,sum=gather)",
    "data=4 compress=randomk(0.1)",
    "data=4 compress=powersgd(1)",
    "data=4 consistency=local(2) compress=qsgd(8)",
    "data=4 consistency=local(2) compress=powersgd(1)",
    "data=4 consistency=gossip(ring) compress=sign",
    "data=4 consistency=gossip(complete) compress=topk(0.1)",
    "shard=2 compress=qsgd(8)",
    "data=2 shard=2 compress=onebit",
    "data=4 topology=server(2) compress=qsgd(8)",
    "data=4 consistency=async topology=server(2) compress=onebit",
    "data=4 consistency=async topology=server(2,inner=2) compress=onebit",
]
PADDING = 16.0
"""Bytes by which the messages of single pieces are longer than one of all: each has a scale, and is padded."""
PAIRS = ["data=4 consistency=gossip(ring,pair)", "data=4 consistency=gossip(complete,pair)"]


def make_parameters() -> dict[str, Tensor]:
    return {f"w{i}": torch.zeros(size).requires_grad_() for i, size in enumerate(SIZES)}


def take_steps(replicas: AbstractReplicas, num_steps: int, charge: Callable[[float], None]) -> tuple[object, ...]:
    """What the loop does, without a model; all that a rank would hold by itself."""
    parameters, optimizer, step = make_parameters(), Optimizer(Momentum(), lr=0.1), 0
    replicas.join(State(parameters, {}, torch.zeros(0)))
    placement = replicas.placement
    owned = placement.owned(parameters)
    state, gradients = optimizer.init(owned), dict[str, Tensor]()
    while (step := replicas.next_step(step)) < num_steps:
        add = replicas.begin(1 / replicas.mesh.num_replicas)
        for name in reversed(parameters):
            charge(0.01)
            gradients[name] = torch.ones_like(parameters[name])
            add(name, gradients[name])
        _, state = replicas.finish(0.0, Update(optimizer, owned, state, 0.1, None, placement.norm))
        step += 1
    return parameters, gradients, state


def run(
    plan: Plan, work: Callable[[AbstractGroup, AbstractReplicas], Any], network: NetworkModel = TEN_GIGABIT
) -> tuple[list[Any], dict[int, RecordingMailbox]]:
    """The results of the workers; and their mailboxes, where they have some."""
    mailboxes: dict[int, RecordingMailbox] = {}

    def act(group: AbstractGroup, replicas: AbstractReplicas) -> Any:
        result = work(group, replicas)
        if plan.channel != "all_reduce":
            replicas.sum(torch.ones(1))
        return result

    spec = RunSpec(optimizer=Optimizer(Momentum(), lr=0.1))
    if plan.channel == "all_reduce":
        choice = algorithm_of(plan) or AlgorithmChoice("ring")
        program = lambda group: act(group, replicas_of(group, plan))  # noqa: E731
        results = run_virtual(program, plan.num_ranks, network=network, choice=choice).results
    else:
        results = run_plan(plan, act, spec=spec, mailboxes=mailboxes, network=network).results
    return list(results[: plan.num_ranks]), mailboxes


def replicas_of(group: AbstractGroup, plan: Plan) -> AbstractReplicas:
    return replicas_in(MeshGroups(group, plan.mesh(group.rank)), plan)


@cache
def bytes_after(text: str, num_steps: int) -> tuple[list[float], float]:
    """That every address has sent, as gradients or weights; and how many joined pushes host servers have."""
    plan = parse_plan(text)
    if plan.channel == "all_reduce":

        def program(group: AbstractGroup) -> int:
            below = RecordingGroup(group)
            above = MessageGroup(below, algorithm_of(plan) or AlgorithmChoice("ring"))
            groups = MeshGroups(above, plan.mesh(group.rank))
            take_steps(replicas_in(groups, plan), num_steps, group.clock.charge)
            lines = [groups.along("data"), groups.along("shard")] if plan.data > 1 < plan.shard else []
            split_off = [line._transport for line in lines if isinstance(line, MessageGroup)]
            return sum(one.traffic.bytes_sent for one in (below, *split_off) if isinstance(one, RecordingGroup))

        return list(run_virtual(program, plan.num_ranks).results), 0
    _, boxes = run(plan, lambda group, replicas: take_steps(replicas, num_steps, group.clock.charge) and None)
    sent: list[float] = [
        sum(count.num_bytes for (_, tag), count in boxes[address].traffic.sent.items() if tag in TAGS)
        for address in sorted(boxes)
    ]
    return sent, sum(box.traffic.sent_under("forward").num_messages for box in boxes.values()) / max(1, plan.num_shards)


def counted(text: str) -> tuple[list[float], float | None]:
    """Bytes of a step, by address, without what is sent at the beginning and at the end; and how many are joined."""
    (before, joined_before), (after, joined_after) = bytes_after(text, SPAN), bytes_after(text, 2 * SPAN)
    sent = [(late - early) / SPAN for early, late in zip(before, after, strict=True)]
    forwards = joined_after - joined_before
    return sent, parse_plan(text).num_ranks * SPAN / forwards if forwards else None


def stated(text: str, joined: float | None = None) -> CommunicationCost:
    """With the report of the loss, which ranks in step send in an all-reduce of its own; with a codec it also tells
    which values did not fit."""
    plan = parse_plan(text)
    shapes = [(size,) for size in SIZES]
    cost = plan_cost(plan, NUM_BYTES, state_bytes=NUM_BYTES, joined=joined, shapes=shapes)
    if plan.consistency.name == "sync" and plan.channel == "all_reduce":
        told = 1 + NUM_TENSORS * (1 if plan.compress.name == "none" else 2)
        cost = cost.plus(all_reduce_cost(find_algorithm(plan), plan.num_ranks, 8 * told))
    return cost


@pytest.mark.parametrize("text", [*GROUPS, *MAILBOXES])
def test_every_address_sends_what_is_stated(text: str) -> None:
    sent, joined = counted(text)
    uneven = 0.0 if "compress" not in text else 8.0  # a report of 15 numbers is cut into unequal parts
    costs = [cost.bytes_sent for cost in stated(text, joined).addresses]
    assert sent == pytest.approx(costs, rel=1e-12, abs=uneven)


@pytest.mark.parametrize("text", CODED)
def test_codecs_send_what_is_stated(text: str) -> None:
    """To a padding for every piece that a rank sends by itself; weights on their way from servers are as they are."""
    sent, joined = counted(text)
    plan = parse_plan(text)
    costs = [cost.bytes_sent for cost in stated(text, joined).addresses]
    pieces = NUM_TENSORS * plan.ranks_per_host if plan.channel == "servers" else plan.shard
    exact = costs[plan.num_ranks :] if plan.channel == "servers" and not plan.num_hosts else []
    assert sent == pytest.approx(costs, rel=1e-12, abs=8.0 + PADDING * pieces)
    assert sent[plan.num_ranks :][: len(exact)] == exact


@pytest.mark.parametrize("text", PAIRS)
def test_pairs_send_what_is_stated(text: str) -> None:
    """Partners are drawn, so that one who answers may be asked more often than another."""
    sent, _ = counted(text)
    cost = stated(text)
    assert sent[:4] == [one.bytes_sent for one in cost.addresses[:4]] and sum(sent) == cost.total_bytes
    asked = [number for number, one in zip(sent[4:], cost.addresses[4:], strict=True) if one.bytes_sent]
    assert sum(asked) == sum(sent[4:])


@pytest.mark.parametrize("text", [*GROUPS, *MAILBOXES, *PAIRS])
def test_a_step_takes_the_rounds_that_are_stated(text: str) -> None:
    """Where a message takes a second, and nothing else any time."""
    network, plan = NetworkModel(Link(1.0, 0.0)), parse_plan(text)

    def work(group: AbstractGroup, replicas: AbstractReplicas, num_steps: int) -> float:
        take_steps(replicas, num_steps, lambda seconds: None)
        return group.clock.now()

    ends = [run(plan, lambda g, r, n=n: work(g, r, n), network)[0] for n in (SPAN, 2 * SPAN)]  # type: ignore[misc]
    seconds = [(late - early) / SPAN for early, late in zip(*ends, strict=True)]
    # Ranks begin and end at moments of their own.
    rounds = plan_cost(plan, NUM_BYTES, state_bytes=NUM_BYTES).of("worker").rounds
    assert sum(seconds) / len(seconds) == pytest.approx(rounds)


@pytest.mark.parametrize("text", [*GROUPS, *(text for text in MAILBOXES if "gossip" not in text)])
def test_a_worker_holds_what_is_stated(text: str) -> None:
    """Of weights and gradients, beside the model's own; scalars aside. Neighbours also hold messages under way."""
    plan = parse_plan(text)

    def work(group: AbstractGroup, replicas: AbstractReplicas) -> int:
        own = take_steps(replicas, 6, lambda seconds: None)
        own_memory = memory_of(own)
        return sum(size for place, size in memory_of(replicas).items() if place not in own_memory and size > 16)

    costs = plan_cost(plan, NUM_BYTES, state_bytes=NUM_BYTES).addresses[: plan.num_ranks]
    not_here = NUM_BYTES * (1 - 1 / plan.shard)  # of the optimizer's state
    assert run(plan, work)[0] == [cost.memory + not_here for cost in costs]


def memory_of(root: object) -> dict[int, int]:
    """Bytes of every tensor that can be reached, but for those of what carries messages, by place in memory."""
    others = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.FrameType)
    carriers = (AbstractGroup, AbstractMailbox, AbstractClock, AbstractWork)
    found, seen, left = dict[int, int](), set[int](), [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (*others, *carriers)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            left += gc.get_referents(one)
    return found


def test_a_cost_that_is_wrong_is_found_out() -> None:
    """One of another period, of another graph, with a push too few, and one that forgot the servers."""
    wrong = {
        "data=4 consistency=local(4)": "data=4 consistency=local(3)",
        "data=4 consistency=gossip(ring)": "data=4 consistency=gossip(complete)",
        "data=4 consistency=async topology=server": "data=4 consistency=async(parts=2) topology=server(2)",
        "data=4 topology=server(2)": "data=4 topology=server(1)",
        "data=4 topology=tree": "data=4 topology=ring",
    }
    for text, other in wrong.items():
        sent, _ = counted(text)
        costs = [cost.bytes_sent for cost in stated(other).addresses]
        assert sent != pytest.approx(costs[: len(sent)] + [0.0] * (len(sent) - len(costs)), rel=1e-12), text


def test_every_value_of_every_axis_has_a_row() -> None:
    for axis, values in AXES.items():
        missing = [name for name, value in values.items() if value.is_available and not value.cost]
        assert missing == (["server"] if axis == "topology" else []), "servers cost what their consistency does"
    tested = {parse_plan(text).consistency.name for text in (*GROUPS, *MAILBOXES)}
    assert tested == set(AXES["consistency"])
