"""Pipelines: layers in stages, and micro-batches that go through them one after the other."""

from weft.distributed.placement.pipeline.actions import Action, Schedule
from weft.distributed.placement.pipeline.cutting import CutLog
from weft.distributed.placement.pipeline.executor import Bubble, PipelineExecutor
from weft.distributed.placement.pipeline.making import make_pipeline, schedule_of
from weft.distributed.placement.pipeline.pipedream import PipeDreamExecutor, Stream, make_stream
from weft.distributed.placement.pipeline.placement import Pipeline
from weft.distributed.placement.pipeline.stages import Partition, StageProgram

__all__ = [
    "Action",
    "Bubble",
    "CutLog",
    "Partition",
    "PipeDreamExecutor",
    "Pipeline",
    "PipelineExecutor",
    "Schedule",
    "StageProgram",
    "Stream",
    "make_pipeline",
    "make_stream",
    "schedule_of",
]
