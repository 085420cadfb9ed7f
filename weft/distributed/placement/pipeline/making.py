"""From a plan to the placement of a rank on the axis `pipeline`, and to its schedule."""

import math
import warnings
from dataclasses import replace
from functools import partial

from weft.distributed.codecs.activations import make_format
from weft.distributed.group.clock import VirtualTimes
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.placement.pipeline.actions import Schedule
from weft.distributed.placement.pipeline.cutting import CutLog, Cutting
from weft.distributed.placement.pipeline.pipedream import Stream
from weft.distributed.placement.pipeline.placement import MakePartition, Pipeline
from weft.specs import Plan
from weft.specs.loading import load
from weft.specs.plan import Choice, value_of
from weft.training.placement import AbstractPlacement

__all__ = ["make_pipeline", "schedule_of"]


def schedule_of(num_stages: int, choice: Choice, num_micro: int | None = None) -> Schedule:
    """The actions of all stages, as the table of axes says; with another number of micro-batches if one is given."""
    if num_micro is not None:
        parameters = {**dict(choice.parameters), "micro": num_micro}
        choice = replace(choice, parameters=tuple(parameters.items()))
    found: Schedule = load(value_of("schedule", choice).realised_by["all_reduce"])(num_stages, choice)
    return found


def make_pipeline(
    groups: MeshGroups,
    plan: Plan,
    inner: AbstractPlacement,
    partition: MakePartition | None = None,
    stream: Stream | None = None,
    times: VirtualTimes | None = None,
    log: CutLog | None = None,
) -> AbstractPlacement:
    """The placement of a rank on the axis `pipeline`. A collective call.

    Args:
        partition: cuts the model; by default as the plan says.
        stream: of minibatches, where the pipeline is never emptied.
        times: of computation, where it takes none by itself.
        log: where cuts are noted.
    """
    is_bounded = plan.stage_memory < math.inf
    schedule = schedule_of(plan.pipeline, plan.schedule, plan.num_micro_batches) if is_bounded else None
    cut, num_chunks = partition or Cutting(groups, plan, schedule, times, log), int(plan.schedule.get("chunks", 1))
    wire_format = make_format(plan.activations)
    if stream is not None:  # its evaluations go through the stages in micro-batches, and nothing else does
        make = partial(_schedule_for, plan.pipeline, Choice("1f1b"))
        return Pipeline(groups, inner, make, 2 * plan.pipeline, num_chunks, cut, wire_format, stream)
    if plan.num_micro_batches < plan.pipeline and groups.world.rank == 0:
        numbers = f"micro-batches: {plan.num_micro_batches}, stages: {plan.pipeline}"
        warnings.warn(
            f"fewer micro-batches than stages, which are idle most of the time ({numbers}); raise micro", stacklevel=2
        )
    make = partial(_schedule_for, plan.pipeline, plan.schedule)
    return Pipeline(groups, inner, make, plan.num_micro_batches, num_chunks, cut, wire_format)


def _schedule_for(num_stages: int, choice: Choice, num_micro: int) -> Schedule:
    return schedule_of(num_stages, choice, num_micro)
