"""Relaxed consistency where it must be the synchronous one, and how far apart the replicas are where it is not."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.cases import make_replicas
from tests.distributed.placement.cases import gradients_of_rank, make_parameters
from weft.distributed.group import AbstractGroup
from weft.distributed.virtual import run_virtual
from weft.graph import State
from weft.training.optimizers import SGD, AbstractOptimizer, Momentum, Optimizer
from weft.training.replicas import Update

SHARES = {2: (0.5, 0.5), 3: (0.5, 0.3, 0.2), 4: (0.25,) * 4}
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-13}
by_type = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def gradients_at(parameters: Mapping[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    """Of a loss of its own for each rank and step, at the weights where they are."""
    noise = gradients_of_rank(parameters, rank, step)
    return {name: noise[name] + parameter.detach().sin() for name, parameter in parameters.items()}


def train(
    size: int, consistency: str, dtype: torch.dtype, optimizer: AbstractOptimizer | None = None, num_steps: int = 10
) -> list[dict[str, Tensor]]:
    """The weights that the ranks stand for after each step, and rank 0's distance from them."""
    optimizer = optimizer or Optimizer(SGD(), lr=0.1)

    def program(group: AbstractGroup) -> list[dict[str, Tensor]]:
        replicas, parameters = make_replicas(consistency)(group), make_parameters(dtype)
        model = State(parameters, {}, torch.zeros(0))
        replicas.join(model)
        state, found = optimizer.init(parameters), []
        for step in range(num_steps):
            weight = SHARES[size][group.rank]
            add = replicas.begin(weight)
            for name, gradient in gradients_at(parameters, group.rank, step).items():
                add(name, gradient)
            _, state = replicas.finish(weight, Update(optimizer, parameters, state, optimizer.lr, None))
            with replicas.use_consensus(model) as consensus:
                agreed = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            distance = consensus.values.get("consensus_distance", 0.0)
            found.append({**agreed, "distance": torch.tensor(distance, dtype=torch.float64)})
        return found

    results = run_virtual(program, size).results
    for mine, other in zip(results[0], results[-1], strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine), "all ranks see one consensus"
    found: list[dict[str, Tensor]] = results[0]
    return found


def largest_difference(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> float:
    """Relative to the largest value of each tensor."""
    return max(
        float((one[name] - two[name]).abs().max() / one[name].abs().max())
        for one, two in zip(a, b, strict=True)
        for name in one
        if name != "distance"
    )


@by_type
@pytest.mark.parametrize("size", SHARES)
def test_a_meeting_after_every_step_is_the_synchronous_run(size: int, dtype: torch.dtype) -> None:
    difference = largest_difference(train(size, "sync", dtype), train(size, "local(1)", dtype))
    assert difference < TOLERANCES[dtype]


@by_type
def test_averaged_momentum_and_a_meeting_after_every_step_is_the_synchronous_run(dtype: torch.dtype) -> None:
    optimizer = Optimizer(Momentum(), lr=0.1)
    synchronous = train(3, "sync", dtype, optimizer)
    assert largest_difference(synchronous, train(3, "local(1,state=mean)", dtype, optimizer)) < TOLERANCES[dtype]


@by_type
def test_gossip_with_everybody_after_the_update_is_the_synchronous_run(dtype: torch.dtype) -> None:
    synchronous = train(4, "sync", dtype)
    assert largest_difference(synchronous, train(4, "gossip(complete,mix=after)", dtype)) < TOLERANCES[dtype]


def test_the_papers_order_is_near_the_synchronous_run_and_not_the_same() -> None:
    """Gradients are taken where each rank is, one update away from the mean, so the two agree to the first order."""
    synchronous, mixed = train(4, "sync", torch.float64), train(4, "gossip(complete)", torch.float64)
    assert largest_difference(synchronous[:1], mixed[:1]) < 1e-13, "the first gradients are those of one point"
    assert 1e-6 < largest_difference(synchronous, mixed) < 0.05


def test_an_outer_step_of_length_one_without_momentum_is_the_mean() -> None:
    plain, outer = (
        train(4, text, torch.float64) for text in ("local(2)", "local(2,outer=nesterov,outer_lr=1,outer_momentum=1e-9)")
    )
    assert largest_difference(plain, outer) < 1e-7


def test_synchronous_steps_come_first_where_the_plan_says_so() -> None:
    momentum = Optimizer(Momentum(), lr=0.1)
    synchronous = train(4, "sync", torch.float64, momentum)
    later = train(4, "local(3,after=5)", torch.float64, momentum)
    assert largest_difference(synchronous[:5], later[:5]) < 1e-13
    assert [bool(found["distance"]) for found in later] == [*[False] * 5, True, True, False, True, True]


def test_distance_is_zero_after_a_meeting_and_grows_between() -> None:
    distances = [float(found["distance"]) for found in train(4, "local(4)", torch.float64, num_steps=8)]
    assert distances[3] == distances[7] == 0.0
    assert 0 < distances[0] < distances[1] < distances[2]


def test_distance_is_the_root_mean_square_over_ranks() -> None:
    found = train(4, "gossip(complete)", torch.float64, num_steps=1)[0]
    gradients = [gradients_at(make_parameters(torch.float64), rank, 0) for rank in range(4)]
    squares = 0.0
    for name in gradients[0]:
        stacked = torch.stack([own[name] for own in gradients]) * 0.1
        squares += float((stacked - stacked.mean(0)).square().sum())
    assert float(found["distance"]) == pytest.approx((squares / 4) ** 0.5, rel=1e-9)


def test_more_neighbours_keep_replicas_nearer() -> None:
    apart = {
        graph: float(train(4, f"gossip({graph})", torch.float64)[-1]["distance"]) for graph in ("ring", "complete")
    }
    assert 0 < apart["complete"] < apart["ring"]


def test_a_spring_keeps_ranks_near_a_centre_that_follows_them() -> None:
    """Every rank has another minimum; alone they would end far apart, and the centre where it began."""
    tight, loose = (train(4, text, torch.float64, num_steps=40) for text in ("elastic(1)", "elastic(1,beta=0.01)"))
    assert float(tight[-1]["distance"]) < float(loose[-1]["distance"])
    start = make_parameters(torch.float64)["w1"].detach()
    assert float((tight[-1]["w1"] - start).norm()) > float((loose[-1]["w1"] - start).norm())
