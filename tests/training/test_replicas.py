"""The one rank that needs nobody, and the update that all kinds of replicas make."""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.training.planted import build_tiny
from weft.specs import Mesh
from weft.training.optimizers import SGD, Optimizer, OptimizerState
from weft.training.replicas import AbstractReplicas, SoloReplicas, Traffic, Update
from weft.training.results import hash_tensors


def make_update(clip_norm: float | None = None) -> Update:
    parameters = {"w": torch.ones(2), "b": torch.ones(1)}
    optimizer = Optimizer(SGD(), lr=0.5)
    return Update(optimizer, parameters, optimizer.init(parameters), 0.5, clip_norm)


def step(replicas: AbstractReplicas, update: Update, loss: float = 1.0) -> tuple[float, OptimizerState]:
    add = replicas.begin(1.0)
    add("b", torch.tensor([4.0]))
    add("w", torch.tensor([0.0, 3.0]))
    return replicas.finish(loss, update)


def test_one_rank_is_rank_0_of_1_and_keeps_everything() -> None:
    replicas, indices = SoloReplicas(), torch.arange(5)
    _, state = build_tiny()
    before = hash_tensors(state.model.parameters)
    replicas.join(state.model)
    replicas.remember(3, replicas.memory())
    with replicas.use_consensus(state.model) as consensus:
        assert consensus.judges is replicas and consensus.values == {}
    assert (replicas.mesh, replicas.is_synchronous) == (Mesh(), True)
    assert replicas.agree_to_stop(True) and not replicas.agree_to_save(False)
    assert replicas.share(indices) is indices and replicas.sum(indices) is indices
    assert replicas.gather(indices) == (indices,)
    assert replicas.collect(state.optimizer) is state.optimizer
    assert hash_tensors(state.model.parameters) == before


def test_a_step_hands_the_gradients_to_the_update() -> None:
    replicas, update = SoloReplicas(), make_update()
    loss, state = step(replicas, update)
    assert loss == 1.0 and state.shared.step.item() == 1
    assert update.parameters["w"].tolist() == [1.0, -0.5] and update.parameters["b"].tolist() == [-1.0]
    assert replicas.traffic() == Traffic(0.0, 0.0, 0)


def test_gradients_of_a_step_do_not_reach_the_next() -> None:
    replicas, update = SoloReplicas(), make_update()
    step(replicas, update)
    before = {name: tensor.clone() for name, tensor in update.parameters.items()}
    replicas.begin(1.0)
    replicas.finish(1.0, update)
    assert all(torch.equal(update.parameters[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_nothing_is_written_where_the_loss_is_not_finite(loss: float) -> None:
    update = make_update()
    _, state = step(SoloReplicas(), update, loss)
    assert state is update.state
    assert update.parameters["w"].tolist() == [1.0, 1.0]


def test_clipping_has_the_bits_of_torch_whatever_order_gradients_come_in() -> None:
    # Regression: the norms were put together in the order of arrival, which is backward's and not torch's.
    generator = torch.Generator().manual_seed(0)
    names = [f"p{i}" for i in range(9)]
    gradients = {name: torch.randn(7 + i, generator=generator) for i, name in enumerate(names)}
    theirs = [nn.Parameter(torch.zeros_like(gradients[name])) for name in names]
    for parameter, name in zip(theirs, names, strict=True):
        parameter.grad = gradients[name].clone()
    nn.utils.clip_grad_norm_(theirs, 0.1)
    ours = {name: torch.zeros_like(gradients[name]) for name in names}
    optimizer = Optimizer(SGD(), lr=1.0)
    arrived: dict[str, Tensor | None] = {name: gradients[name] for name in reversed(names)}
    Update(optimizer, ours, optimizer.init(ours), 1.0, 0.1).apply(arrived)
    for name, parameter in zip(names, theirs, strict=True):
        assert parameter.grad is not None and torch.equal(ours[name], -parameter.grad)


def test_a_parameter_without_a_gradient_is_clipped_and_updated_without() -> None:
    update = make_update(clip_norm=1.0)
    update.apply({"w": torch.tensor([0.0, 3.0])})
    assert update.parameters["b"].tolist() == [1.0]
    torch.testing.assert_close(update.parameters["w"], torch.tensor([1.0, 0.5]))
