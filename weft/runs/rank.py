"""The rank program of a run: one process of a job, from its place to the end of its training."""

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from weft.console import error_console
from weft.distributed.group.group import AbstractGroup
from weft.distributed.place import LaunchedPlace, open_group
from weft.distributed.realise import RunSpec, realise
from weft.records.run_folder import use_alone
from weft.runs.job import Job
from weft.runs.progress import use_progress
from weft.training.process import keep_freed_memory
from weft.training.replicas import AbstractReplicas
from weft.training.run import resume_run, run_recipe
from weft.training.surroundings import Surroundings

__all__ = ["interrupted", "join_job", "train_at", "train_rank"]


def train_rank(job: dict[str, Any], quiet: bool) -> None:
    """Be the process of the job that the environment tells of; a rank program.

    Args:
        job: as `Job.to_json` gives it.
        quiet: show no progress.
    """
    train_at(LaunchedPlace(), Job.from_json(job), quiet=quiet)


def join_job(place: LaunchedPlace, make_job: Callable[[int], Job], *, quiet: bool) -> Job:
    """Be one of the ranks that another launcher started: rank 0 makes the job and tells the rest."""
    made: Job | None = None
    with ExitStack() as until_end:
        try:
            group = open_group(place.launch, generation=1)
            try:
                if group.rank == 0:
                    made = make_job(group.size)
                    until_end.enter_context(use_alone(made.folder))
                job = _broadcast_job(group, made)
            finally:
                group.close()
            train_at(place, job, quiet=quiet)
        except KeyboardInterrupt:
            raise KeyboardInterrupt if made is None else interrupted(made) from None
    return job


def interrupted(job: Job) -> KeyboardInterrupt:
    """The interrupt of a job, which says how it can go on."""
    return KeyboardInterrupt(f"interrupted; go on with: weft run --resume {shlex.quote(str(job.folder.path))}")


def train_at(place: LaunchedPlace, job: Job, *, quiet: bool) -> None:
    """Be the process of the job at this place."""
    place = place.on(job.recipe.mutable.device)
    spec = RunSpec.of(job.recipe, job.seeds, run=job.folder.path, replay=job.replay)
    with realise(job.recipe.mutable.plan, place, spec) as replicas:
        if replicas is not None:
            _train(job, replicas, Surroundings(device=place.device), quiet=quiet)


def _train(job: Job, replicas: AbstractReplicas, surroundings: Surroundings, *, quiet: bool) -> None:
    """Rank 0 shows the progress of all."""
    keep_freed_memory()
    console, is_first = error_console(), replicas.mesh.rank == 0
    console.quiet = not is_first
    with use_progress(console, [f"seed {seed}" for seed in job.seeds], quiet=quiet or not is_first) as listener:
        if job.is_resumed:
            resume_run(job.folder, listeners=[listener], replicas=replicas, begun=job.begun, surroundings=surroundings)
        else:
            run_recipe(
                job.recipe,
                folder=job.folder,
                seeds=job.seeds,
                listeners=[listener],
                replicas=replicas,
                surroundings=surroundings,
            )


def _broadcast_job(group: AbstractGroup, job: Job | None) -> Job:
    """Rank 0's job, on every rank: its JSON, as bytes."""
    text = json.dumps(job.to_json()).encode() if job else b""
    length = torch.tensor([len(text)])
    group.broadcast(length)
    content = torch.tensor(list(text), dtype=torch.uint8) if job else torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(content)
    return job or Job.from_json(json.loads(bytes(content.tolist())))
