"""What ranks tell that they hand over, and what plans cost beside each other; test_plan_costs.py counts each."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.distributed.consistency.test_limits import gradients_at
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.collectives import AlgorithmChoice, MessageGroup
from weft.distributed.consistency import GRAPHS, make_mixing
from weft.distributed.group import AbstractGroup, RecordingGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.errors import UsageError
from weft.graph import State
from weft.planning.cost import estimate
from weft.planning.gossip_graphs import num_neighbours
from weft.planning.plan_cost import plan_cost
from weft.specs import parse_plan
from weft.specs.plan import Choice
from weft.training.optimizers import Momentum, Optimizer
from weft.training.replicas import Update

NUM_STEPS = 12  # a whole number of rounds of every scheme below


def make_parameters() -> dict[str, Tensor]:
    """64 numbers, so that 2 and 4 ranks divide them and the ring is exact."""
    return {"w": torch.zeros(6, 10), "b": torch.zeros(4)}


def count(size: int, consistency: str) -> tuple[list[int], list[int]]:
    """Bytes that each rank sent over messages in the steps, and what its own traffic says of them."""
    plan = parse_plan(f"data={size} consistency={consistency}")

    def program(group: AbstractGroup) -> tuple[int, int]:
        below = RecordingGroup(group)
        replicas = replicas_in(MeshGroups(MessageGroup(below, AlgorithmChoice("ring")), plan.mesh(below.rank)), plan)
        parameters = {name: p.requires_grad_() for name, p in make_parameters().items()}
        optimizer = Optimizer(Momentum(), lr=0.1)
        replicas.join(State(parameters, {}, torch.zeros(0)))
        state, before, told = optimizer.init(parameters), below.traffic.bytes_sent, 0
        for step in range(NUM_STEPS):
            add = replicas.begin(1 / size)
            for name, gradient in gradients_at(parameters, group.rank, step).items():
                add(name, gradient)
            _, state = replicas.finish(0.0, Update(optimizer, parameters, state, 0.1, None))
            told += replicas.traffic().num_bytes
        return below.traffic.bytes_sent - before, told

    sent, told = zip(*run_virtual(program, size).results, strict=True)
    return list(sent), list(told)


def test_a_rank_tells_what_it_hands_over() -> None:
    """The record's bytes are those of messages given to the group, once for each neighbour; an all-reduce makes more of
    them. Once, weights were counted once whoever heard them."""
    num_bytes = sum(parameter.nbytes for parameter in make_parameters().values())
    assert count(4, "local(4)")[1] == [3 * num_bytes] * 4
    for graph in ("ring", "exponential", "complete"):
        sent, told = count(4, f"gossip({graph})")
        assert told == sent == [12 * num_bytes * num_neighbours(graph, 4)] * 4
    assert count(4, "elastic(3)")[1] == [12 * num_bytes, *[4 * num_bytes] * 3]


@given(st.sampled_from(sorted(GRAPHS)), st.integers(2, 70))
def test_the_planner_counts_the_neighbours_that_there_are(name: str, size: int) -> None:
    assert num_neighbours(name, size) == make_mixing(name, size).num_neighbours


def test_relaxed_plans_are_cheaper_than_a_step_together() -> None:
    together = plan_cost(parse_plan("data=64"), 1e6)
    for text in ("local(8)", "gossip(ring)", "elastic(64)"):
        cost = plan_cost(parse_plan(f"data=64 consistency={text}"), 1e6)
        assert cost.rounds < together.rounds
        assert estimate(cost, alpha=3e-5, beta=8e-10) < estimate(together, alpha=3e-5, beta=8e-10)
    assert plan_cost(parse_plan("data=64 consistency=local(8)"), 1e6).rank_bytes < 0.25e6


def test_an_all_reduce_costs_what_its_topology_does() -> None:
    tree, ring = (plan_cost(parse_plan(f"data=8 topology={name}"), 1000.0) for name in ("tree", "ring"))
    assert (tree.rounds, ring.rounds) == (6, 14)
    assert plan_cost(parse_plan("data=8 topology=hierarchical(4)"), 1000.0).rounds == 8


def test_a_plan_without_a_formula_is_refused() -> None:
    with pytest.raises(UsageError, match="cost of this plan is not known"):
        plan_cost(replace(parse_plan("data=2 topology=server"), consistency=Choice("local")), 1.0)
