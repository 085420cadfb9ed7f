"""The placement seam holds more than sharded state: a model in two stages, one on each rank, is trained by the loop
that trains every other plan.

    rank 0    first half -- activations -->                         <-- their gradient -- backward
    rank 1                                 second half, loss, backward
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.virtual import run_virtual
from weft.graph import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.proving.method import Case
from weft.specs import Axis, Batch, Mesh
from weft.specs.mesh import REPLICATED
from weft.training.build import build_task
from weft.training.evaluation import evaluate
from weft.training.gradients import joint_norm
from weft.training.loop import take_step
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.placement import AbstractPlacement, MakeExecutor
from weft.training.replicas import AbstractReplicas, SoloReplicas

STEPS, CUT, WIDTH = 3, 3, 16  # the first three layers end in 16 numbers


@final
class StageExecutor(AbstractExecutor):
    """One half of a sequence of layers."""

    def __init__(self, whole: AbstractExecutor, group: AbstractGroup) -> None:
        layers = list(whole._module.named_children())  # type: ignore[attr-defined]
        own = layers[:CUT] if group.rank == 0 else layers[CUT:]
        self._layers = nn.Sequential(*(layer for _, layer in own))
        self._parameters = {f"{i}.{name}": p for i, layer in own for name, p in layer.named_parameters()}
        self._loss = whole._loss  # type: ignore[attr-defined]
        self._group = group

    def initial_state(self) -> State:
        return State(self._parameters, {}, torch.get_rng_state())

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        outputs, activations = self._forward(batch)
        if self._group.rank == 0:
            gradient = torch.empty_like(activations)
            self._group.recv(gradient, 1)
            activations.backward(gradient)
        else:
            outputs.loss.backward()
            assert activations.grad is not None
            self._group.send(activations.grad, 0)
        for name, parameter in self._parameters.items():
            on_gradient(name, parameter.grad)
            parameter.grad = None
        return Outputs(outputs.loss.detach(), outputs.predictions.detach()), state

    def infer(self, state: State, batch: Batch) -> Outputs:
        with torch.no_grad():
            return self._forward(batch)[0]

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return None

    def _forward(self, batch: Batch) -> tuple[Outputs, Tensor]:
        if self._group.rank == 0:
            activations: Tensor = self._layers(*batch.inputs)
            self._group.send(activations.detach(), 1)
            return Outputs(torch.zeros(()), torch.empty(0)), activations
        received = torch.empty(len(batch), WIDTH, requires_grad=True)
        self._group.recv(received.detach(), 0)
        predictions = self._layers(received)
        return Outputs(self._loss(predictions, *batch.targets), predictions), received


@final
class Stages(AbstractPlacement):
    def __init__(self, world: AbstractGroup) -> None:
        self._world = world

    def place(self, module: nn.Module) -> nn.Module:
        return module

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        return StageExecutor(make(module, loss), self._world)

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        return REPLICATED

    @property
    def has_loss(self) -> bool:
        return self._world.rank == self._world.size - 1

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return parameters

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        return optimizer.prepare(parameters, state)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        raise NotImplementedError

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return 0

    def cut_of(self, name: str) -> None:
        return None

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        square = joint_norm(norms).square().reshape(1)
        self._world.all_reduce(square)
        return square.sqrt().squeeze()


def clipped() -> Case:
    return case_of(small_mlp(clip_norm=0.05), "data=1", 1)


def train_with(replicas: AbstractReplicas) -> tuple[dict[str, Tensor], list[float], dict[str, float]]:
    """Parameters, losses and scores after some steps."""
    case = clipped()
    task, state = build_task(case.recipe, case.splits, 0, replicas)
    replicas.join(state.model)
    losses = []
    for _ in range(STEPS):
        state, result = take_step(task, state)
        losses.append(result.loss)
    scores = evaluate(task.executor, state.model, case.splits.test, ("accuracy",), replicas)
    return {name: p.detach().clone() for name, p in state.model.parameters.items()}, losses, scores


def train_in_stages(placement: Callable[[AbstractGroup], AbstractPlacement]) -> list[Any]:
    def program(group: AbstractGroup) -> Any:
        groups = MeshGroups(group, Mesh(group.rank, pipeline=2))
        return train_with(DataParallel(groups.replicas, world=group, mesh=groups.mesh, placement=placement(group)))

    return list(run_virtual(program, 2).results)


def test_two_stages_give_what_one_rank_gives() -> None:
    parameters, losses, scores = train_with(SoloReplicas())
    first, last = train_in_stages(Stages)
    assert [*first[0], *last[0]] == list(parameters)
    for name, found in {**first[0], **last[0]}.items():
        torch.testing.assert_close(found, parameters[name], rtol=1e-6, atol=1e-7)
    assert first[1] == last[1] == pytest.approx(losses)  # known to the stage that has no loss, too
    assert first[2] == last[2] == pytest.approx(scores)


def test_a_stage_that_clips_by_its_own_norm_is_caught() -> None:
    @final
    class Short(Stages):  # type: ignore[misc]
        def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
            return joint_norm(norms)

    parameters, _, _ = train_with(SoloReplicas())
    first, _ = train_in_stages(Short)
    assert any(not torch.allclose(found, parameters[name]) for name, found in first[0].items())
