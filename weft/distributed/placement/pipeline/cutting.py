"""How a plan cuts a model into stages: by which costs of its layers, for ranks of which speeds, in which memory.

    cut=time(stages=measured,memory=4)

    costs     operations that are counted, seconds that rank 0 measures, or bytes of parameters
    speeds    of the ranks of every stage, the slowest of them, times the ways in which they split its layers
    memory    GB of a stage; of one in several chunks, an equal share for each

Where time is virtual, layers take what the cluster charges for them, and a probe what it makes of the rank's pace.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.distributed.group.clock import VirtualTimes
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.pipeline.actions import Schedule
from weft.distributed.placement.pipeline.partition import Costs, partition
from weft.distributed.placement.pipeline.partition_units import Unit
from weft.distributed.placement.pipeline.stages import Partition
from weft.distributed.placement.pipeline.timeline import most_in_flight
from weft.distributed.placement.shares import measure_stages
from weft.metrics.timing import synchronise_device
from weft.specs import Plan

__all__ = ["CutLog", "Cutting", "kept_by"]


class CutLog(Protocol):
    """Where cuts are noted, and where those of a run that is repeated come from."""

    def begin(self) -> Sequence[int] | None:
        """A model is about to be cut. The first units of stages in the run that this one repeats; None to decide."""

    def note(self, cut: Partition) -> None: ...


@dataclass(frozen=True)
class Cutting:
    """Cuts a model as a plan says. A collective call of all ranks, whose cuts are the same: that of rank 0.

    Args:
        schedule: says how many micro-batches wait in a stage; None where nothing is bounded by them.
        times: where time is virtual.
    """

    groups: MeshGroups
    plan: Plan
    schedule: Schedule | None = None
    times: VirtualTimes | None = None
    log: CutLog | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], num_parts: int) -> Partition:
        num_chunks = num_parts // self.plan.pipeline
        memory = self.plan.stage_memory / num_chunks
        recorded = self.log.begin() if self.log is not None else None
        cut = partition(
            module,
            inputs,
            num_parts,
            self._costs(),
            speeds=self._speeds(module) * num_chunks if recorded is None else None,
            memory=memory if memory < math.inf else None,
            kept=None if self.schedule is None else kept_by(self.schedule),
            group=self.groups.world,
            firsts=recorded,
        )
        if self.log is not None:
            self.log.note(cut)
        return cut

    def _costs(self) -> Costs:
        costs = self.plan.stage_costs
        if costs != "time" or self.times is None:
            return costs
        seconds_of = self.times.layers
        if seconds_of is None:
            return "parameters"

        def cost(unit: Unit) -> float:
            return seconds_of(unit.parameters)

        return cost

    def _speeds(self, module: nn.Module) -> tuple[float, ...]:
        """Of stages, relative to each other. Ranks that split layers have them done together."""
        mesh = self.groups.mesh
        if not self.plan.measures_stages:
            return (1.0,) * mesh.pipeline
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        probe = self.times.probe if self.times is not None else partial(_multiply, device)
        speeds = measure_stages(self.groups.world, mesh, probe)
        ways = mesh.stages or (mesh.tensor,) * mesh.pipeline
        return tuple(speed * number for speed, number in zip(speeds, ways, strict=True))


def kept_by(schedule: Schedule) -> tuple[int, ...]:
    """Micro-batches whose activations wait in each part of a model at the same time, at the most."""
    return tuple(
        most_in_flight(tuple(action for action in row if action.chunk == chunk))
        for chunk in range(schedule.num_chunks)
        for row in schedule.stages
    )


def _multiply(device: torch.device) -> None:
    """Some products of matrices."""
    matrix = torch.ones(256, 256, device=device)
    for _ in range(4):
        matrix = matrix @ matrix / 256
    synchronise_device(device)
