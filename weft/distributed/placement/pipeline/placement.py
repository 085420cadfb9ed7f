"""The placement of a stage: a rank holds some of the layers, and passes micro-batches on."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.distributed.codecs.activations import AbstractWireFormat
from weft.distributed.placement.chunks import Chunks, chunks_of
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.pipeline.actions import Schedule
from weft.distributed.placement.pipeline.executor import PipelineExecutor
from weft.distributed.placement.pipeline.pipedream import PipeDreamExecutor, Stream
from weft.distributed.placement.pipeline.put_off import Postponement
from weft.distributed.placement.pipeline.stages import Partition, StageProgram
from weft.distributed.placement.pipeline.step import RankOfPipeline
from weft.distributed.placement.pipeline.wiring import Wiring
from weft.distributed.placement.whole import gather_whole
from weft.errors import PlanError
from weft.graph import AbstractExecutor, EagerExecutor, Loss
from weft.specs.mesh import Axis
from weft.training.checkpoint import Cut
from weft.training.gradients import joint_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState
from weft.training.placement import AbstractPlacement, MakeExecutor
from weft.training.weighting import Weighting

__all__ = ["MakePartition", "Pipeline"]

MakePartition = Callable[[nn.Module, tuple[Tensor, ...], int], Partition]
"""Of a module, inputs like those that it will get, and the number of stages."""


@final
class Pipeline(AbstractPlacement):
    """One stage of several, in one chunk of layers or in more.

    Args:
        schedule: from a number of micro-batches to what all stages do.
        num_micro: into how many a share of a batch is cut.
        num_chunks: runs of layers that every stage has.
        partition: cuts the model.
        wire_format: in which values between stages travel.
        stream: the minibatches under way where the pipeline is never emptied (PipeDream).
    """

    def __init__(
        self,
        groups: MeshGroups,
        inner: AbstractPlacement,
        schedule: Callable[[int], Schedule],
        num_micro: int,
        num_chunks: int,
        partition: MakePartition,
        wire_format: AbstractWireFormat,
        stream: Stream | None = None,
    ) -> None:
        self._groups, self._mesh, self._inner = groups, groups.mesh, inner
        self._replica, self._holders = groups.one_replica, groups.holders
        self._schedule, self._num_micro, self._num_chunks = schedule, num_micro, num_chunks
        self._partition, self._stream = partition, stream
        self._format = wire_format
        self._stage = self._mesh.coordinate("pipeline")
        self._inputs: tuple[Tensor, ...] = ()
        self._programs: tuple[StageProgram, ...] = ()
        self._wiring = Wiring(())
        self._executor: PipelineExecutor | PipeDreamExecutor | None = None
        self._tied: Mapping[str, tuple[int, ...]] = {}  # names to stages
        self._shapes: dict[str, torch.Size] = {}  # of tied parameters, whole

    def use_whole(self) -> AbstractContextManager[None]:
        return self._inner.use_whole()

    def look_at(self, inputs: tuple[Tensor, ...]) -> None:
        self._inputs = inputs
        self._inner.look_at(inputs)

    def place(self, module: nn.Module) -> nn.Module:
        module = self._inner.place(module)
        num_stages = self._mesh.pipeline
        found = self._partition(module, self._inputs, num_stages * self._num_chunks)
        _check(found, num_stages, self._num_chunks)
        self._wiring = Wiring.of(found.stages)
        self._programs = found.stages[self._stage :: num_stages]
        held = {
            name: tuple(sorted({number % num_stages for number in numbers})) for name, numbers in found.tied.items()
        }
        self._tied = {name: stages for name, stages in held.items() if len(stages) > 1}
        if self._stream is not None and self._tied:
            name, stages = next(iter(self._tied.items()))
            what = f"{name}: stages {', '.join(map(str, stages))}"
            raise PlanError(f"stages of PipeDream would update a tied parameter in other steps ({what}); use 1f1b")
        placed = self._programs[0].module if self._num_chunks == 1 else Chunks([p.module for p in self._programs])
        self._shapes = {name: p.shape for name, p in placed.named_parameters() if name in self._tied}
        return placed

    def execute(self, module: nn.Module, loss: Loss, make: MakeExecutor) -> AbstractExecutor:
        modules = chunks_of(module)
        programs = tuple(replace(p, module=own) for p, own in zip(self._programs, modules, strict=True))
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._check_tied(dict(module.named_parameters()))
        rank = RankOfPipeline(
            stage=self._stage,
            num_stages=self._mesh.pipeline,
            programs=programs,
            trained=tuple({n: p for n, p in own.named_parameters() if p.requires_grad} for own in modules),
            wiring=self._wiring,
            loss=loss,
            device=device,
            context=_context_of(make(nn.Identity(), loss), device),
            postponements=tuple(map(Postponement, modules)),
            wire_format=self._format,
        )
        world, mesh = self._groups.world, self._mesh
        executor = PipelineExecutor(rank, world, mesh, self._schedule, self._num_micro, self._tied)
        stream = self._stream
        self._executor = executor if stream is None else PipeDreamExecutor(executor, rank, world, mesh, stream)
        return self._executor

    @property
    def has_loss(self) -> bool:
        return self._stage == self._mesh.pipeline - 1 and self._inner.has_loss

    def reduced_over(self, name: str) -> tuple[Axis, ...]:
        return self._inner.reduced_over(name)

    @property
    def weighting(self) -> Weighting | None:
        return self._inner.weighting

    @property
    def activation_bytes(self) -> int:
        return self._inner.activation_bytes + (self._executor.activation_bytes if self._executor else 0)

    def owned(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._inner.owned(parameters)

    def prepare(
        self, optimizer: AbstractOptimizer, parameters: Mapping[str, Tensor], state: OptimizerState
    ) -> Mapping[str, Tensor]:
        newest = state if self._stream is None else self._stream.newest_state(state)
        return self._inner.prepare(optimizer, parameters, newest)

    def take_over(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._inner.take_over(optimizer, parameters)

    def spread(self, tensors: Mapping[str, Tensor]) -> int:
        return self._inner.spread(tensors)

    def cut_of(self, name: str) -> Cut | None:
        return self._inner.cut_of(name)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return gather_whole(self._holders, self.cut_of, tensors)

    def norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Over all stages; a parameter that several hold counts in the first of them, and a stage that is split in
        several ways once."""
        own = {name: norm for name, norm in norms.items() if self._tied.get(name, (self._stage,))[0] == self._stage}
        norm = joint_norm(own)
        if self._stream is not None:
            return norm  # of the stage: the others come to this minibatch in other steps
        square = norm.cpu().double().square().reshape(1)
        if self._mesh.coordinate("tensor"):
            square.zero_()
        self._replica.all_reduce(square)
        return square.sqrt().squeeze().to(device=norm.device, dtype=norm.dtype)

    def _check_tied(self, parameters: Mapping[str, Tensor]) -> None:
        """Stages that add up a gradient must have the same part of it."""
        if len(set(self._mesh.stages)) < 2:
            return
        for name, shape in self._shapes.items():
            if parameters[name].shape != shape:
                ways = ":".join(map(str, self._mesh.stages))
                raise PlanError(
                    "tied parameter is split, and its stages are so in different ways "
                    f"(parameter: {name}, tensor: {ways}); use the same number in all stages"
                )


def _check(partition: Partition, num_stages: int, num_chunks: int) -> None:
    wanted = num_stages * num_chunks
    if len(partition.stages) != wanted:
        numbers = f"parts: {len(partition.stages)}, stages: {num_stages}, chunks: {num_chunks}"
        raise PlanError(f"model cannot be cut into so many parts ({numbers}); use fewer stages or chunks")
    for number, program in enumerate(partition.stages):
        if not any(True for _ in program.module.parameters()):
            what = f"stage: {number % num_stages}, chunk: {number // num_stages}, of {wanted} parts"
            raise PlanError(f"stage has no parameters ({what}); use fewer stages or chunks")


def _context_of(executor: AbstractExecutor, device: torch.device) -> Callable[[], Any]:
    """The recipe's wish for autocast. Stages are computed by autograd, one micro-batch at a time."""
    if not isinstance(executor, EagerExecutor):
        kind = type(executor).__name__
        raise PlanError(f"stages of a pipeline are computed eagerly (executor: {kind}); use executor=eager")
    dtype = executor.autocast
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
