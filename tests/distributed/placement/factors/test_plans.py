"""Plans with factors that are refused, each with its reason, and what a plan costs."""

import pytest

from tests.distributed.placement.proofs import prove_on_virtual_ranks, small_net
from weft.errors import PlanError
from weft.planning.plan_cost import plan_cost
from weft.specs import parse_plan


@pytest.mark.parametrize(
    ("text", "reason", "nearest"),
    [
        ("data=2 consistency=local", "send weights", "data=2 consistency=local\\(steps=8\\)"),
        ("data=2 consistency=gossip", "send weights", "data=2 consistency=gossip\\(graph=ring\\)"),
        ("data=2 topology=server", "servers hold pieces of weights", "data=2 topology=server\\(shards=1\\)"),
        ("data=2 consistency=async topology=server", "servers hold pieces", "data=2 consistency=async"),
        ("shard=2", "it holds parts of them", "data=1 shard=2"),
        ("tensor=2", "it holds parts of them", "data=1 tensor=2"),
        ("data=2 pipeline=2", "it holds parts of them", "data=2 pipeline=2"),
    ],
)
def test_plans_without_factors_to_send(text: str, reason: str, nearest: str) -> None:
    with pytest.raises(PlanError, match=f"{reason}.* nearest: {nearest}"):
        parse_plan(f"{text} compress=factors")


def test_a_captured_graph_is_refused() -> None:
    with pytest.raises(PlanError, match="use executor=eager"):
        prove_on_virtual_ranks(small_net("mlp", executor="graph"), "data=2 compress=factors")


def test_without_rows_a_plan_costs_no_more_than_its_gradients() -> None:
    dense, factors = (parse_plan(f"data=4 compress={name}") for name in ("none", "factors"))
    assert plan_cost(factors, 1000.0).busiest == plan_cost(dense, 1000.0).busiest
