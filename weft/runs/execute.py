"""Carrying out a job: in this process, on ranks of its own, or on the ranks that torchrun or mpirun started."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.console import error_console
from weft.distributed.place import LaunchedPlace
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.engines.tolerance import tolerance_of
from weft.errors import TrainingError, UsageError
from weft.records.run_folder import RunFolder, use_alone
from weft.runs.job import Job
from weft.runs.rank import interrupted, join_job, train_at

__all__ = ["Finished", "execute"]


@dataclass(frozen=True)
class Finished:
    """A run that has ended, well or not; its record is in the folder."""

    folder: RunFolder
    failure: TrainingError | None = None


def execute(make_job: Callable[[int | None], Job], *, quiet: bool, restarts: int = 0) -> Finished | None:
    """Train, with one progress bar on the standard error. None on ranks that have nothing to tell.

    Args:
        make_job: makes the job, given the number of processes that were started from outside, if they were.
        restarts: how often workers that were lost are started again, in all.
    """
    place = LaunchedPlace()
    if place.launch.launcher != "nobody":
        if restarts:
            raise UsageError(f"ranks were started by {place.launch.launcher}, not by weft; leave --restarts out")
        job = join_job(place, make_job, quiet=quiet)
        return Finished(job.folder) if place.rank == 0 else None
    job = make_job(None)
    plan = job.recipe.mutable.plan
    try:
        with use_alone(job.folder):
            if plan.roles.num_processes == 1:
                train_at(place, job, quiet=quiet)
            else:
                if not quiet:
                    error_console().print(f"starting {plan.roles.num_processes} processes")
                program = RankProgram("weft.runs.rank:train_rank", {"job": job.to_json(), "quiet": quiet})
                run_ranks(program, plan.roles.num_processes, tolerance=tolerance_of(plan, restarts))
    except TrainingError as error:
        return Finished(job.folder, error)
    except KeyboardInterrupt:
        raise interrupted(job) from None
    return Finished(job.folder)
