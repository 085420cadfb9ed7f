"""Carrying out a job: in this process, on ranks of its own, or on the ranks that torchrun or mpirun started."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.cli.console import error_console
from weft.cli.job import Job
from weft.cli.progress import use_progress
from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement import carry_out
from weft.engines.local import run_ranks
from weft.engines.meeting import meet
from weft.engines.memory import keep_freed_memory
from weft.engines.place import Place, find_place
from weft.engines.rank_program import RankProgram
from weft.engines.serving import Service, tolerance_of, use_replicas
from weft.errors import TrainingError, UsageError
from weft.metrics.run_folder import RunFolder
from weft.specs import parse_plan
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.run import resume_run, run_recipe

__all__ = ["Finished", "execute", "train_rank"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended, well or not; its record is in the folder."""

    folder: RunFolder
    failure: TrainingError | None = None


def execute(make_job: Callable[[int | None], Job], *, quiet: bool, restarts: int = 0) -> Finished | None:
    """Train, with one progress bar on the standard error. None on ranks that have nothing to tell.

    Args:
        make_job: makes the job, given the number of ranks that were started from outside, if they were.
        restarts: how often workers that were lost are started again, in all.
    """
    place = find_place()
    if place.starter != "nobody":
        if restarts:
            raise UsageError(f"ranks were started by {place.starter}, not by weft; leave --restarts out")
        return _join(place, make_job, quiet=quiet)
    job = make_job(None)
    plan = parse_plan(job.recipe.mutable.plan)
    try:
        if plan.num_ranks == 1:
            _train(job, SoloReplicas(), quiet=quiet)
        else:
            program = RankProgram("weft.cli.ranks:train_rank", {"job": _to_json(job), "quiet": quiet})
            run_ranks(program, plan.num_processes, tolerance=tolerance_of(plan, restarts))
    except TrainingError as error:
        return Finished(job.folder, error)
    except KeyboardInterrupt:
        _tell_how_to_resume(job)
        raise
    return Finished(job.folder)


def train_rank(job: dict[str, Any], quiet: bool) -> None:
    """The rank program of `weft run --workers`."""
    _join_and_train(_from_json(job), find_place(), quiet=quiet)


def _join_and_train(job: Job, place: Place, *, quiet: bool) -> None:
    service = Service(job.recipe, job.seeds, run=job.folder.path, replay=job.replay)
    with use_replicas(service, place) as replicas:
        if replicas is not None:
            _train(job, replicas, quiet=quiet)


def _join(place: Place, make_job: Callable[[int | None], Job], *, quiet: bool) -> Finished | None:
    """Be one of the ranks that others started: rank 0 makes the job and tells the rest."""
    made: Job | None = None
    group = meet(place)
    try:
        made = make_job(group.size) if group.rank == 0 else None
        job = _tell(group, made)
        plan = parse_plan(job.recipe.mutable.plan)
        if plan.is_served or plan.is_mailed:
            _join_and_train(job, place, quiet=quiet)
        else:
            _train(job, carry_out(plan, group, buffers=job.recipe.mutable.buffers), quiet=quiet)
    except KeyboardInterrupt:
        if made is not None:
            _tell_how_to_resume(made)
        raise
    finally:
        group.close()
    return Finished(job.folder) if group.rank == 0 else None


def _train(job: Job, replicas: AbstractReplicas, *, quiet: bool) -> None:
    """Be this rank of the job. Rank 0 shows the progress of all."""
    keep_freed_memory()
    console = error_console()
    console.quiet = replicas.rank > 0
    with use_progress(console, [f"seed {seed}" for seed in job.seeds], quiet=quiet or replicas.rank > 0) as listener:
        if job.is_resumed:
            resume_run(job.folder, listeners=[listener], replicas=replicas, begun=job.begun)
        else:
            run_recipe(job.recipe, folder=job.folder, seeds=job.seeds, listeners=[listener], replicas=replicas)


def _tell_how_to_resume(job: Job) -> None:
    path = shlex.quote(str(job.folder.path))
    error_console().print(f"interrupted; go on with: weft run --resume {path}", soft_wrap=True)


def _to_json(job: Job) -> dict[str, Any]:
    return {
        "recipe": job.recipe.to_dict(),
        "folder": str(job.folder.path),
        "seeds": list(job.seeds),
        "is_resumed": job.is_resumed,
        "replay": None if job.replay is None else str(job.replay),
        "begun": list(job.begun),
    }


def _from_json(data: dict[str, Any]) -> Job:
    folder = RunFolder(Path(data["folder"]))
    replay = None if data["replay"] is None else Path(data["replay"])
    recipe, seeds, begun = Recipe.from_dict(data["recipe"]), tuple(data["seeds"]), tuple(data["begun"])
    return Job(recipe, folder, seeds, data["is_resumed"], replay, begun)


def _tell(group: AbstractGroup, job: Job | None) -> Job:
    """Rank 0's job, on every rank: its JSON, broadcast as bytes."""
    text = json.dumps(_to_json(job)).encode() if job else b""
    length = torch.tensor([len(text)])
    group.broadcast(length)
    content = torch.tensor(list(text), dtype=torch.uint8) if job else torch.empty(int(length), dtype=torch.uint8)
    group.broadcast(content)
    return job or _from_json(json.loads(bytes(content.tolist())))
