"""From what `weft run` was given to a training that can be started."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.cli.console import error_console
from weft.cli.progress import use_progress
from weft.errors import UsageError
from weft.metrics.record import RunRecord
from weft.metrics.record_file import read_record
from weft.metrics.run_folder import RunFolder, create_run_folder, open_run_folder
from weft.recipes import find_recipe
from weft.training.build import check_recipe
from weft.training.recipe import Recipe
from weft.training.run import resume_run, run_recipe

__all__ = ["Job", "execute", "new_job", "resumed_job"]


@dataclass(frozen=True)
class Job:
    """A run folder, the seeds that are still to be trained, and what trains them."""

    folder: RunFolder
    seeds: tuple[int, ...]
    start: Callable[..., RunRecord]  # takes `listeners`


def new_job(recipe: str | None, settings: Sequence[str], *, num_seeds: int, first_seed: int, out: Path | None) -> Job:
    """A run that starts from nothing. What is wrong with the recipe is said before a folder is made."""
    if recipe is None:
        raise UsageError("no recipe was given; name one that `weft list` shows, or use --resume")
    chosen = with_settings(find_recipe(recipe), settings)
    check_recipe(chosen)
    seeds = tuple(range(first_seed, first_seed + num_seeds))
    folder = create_run_folder(out, chosen.name)
    return Job(folder, seeds, partial(run_recipe, chosen, folder=folder, seeds=seeds))


def resumed_job(path: Path, recipe: str | None, given: Sequence[str]) -> Job:
    """The rest of a run. Its settings are in its record, so options that would change them are refused."""
    if given:
        raise UsageError(f"a resumed run keeps its settings ({', '.join(given)}); leave them out, or start a new run")
    folder = open_run_folder(path)
    record = read_record(path)
    if recipe is not None and find_recipe(recipe).name != record.name:
        raise UsageError(f"run is of another recipe ({path}: {record.name}, given: {recipe}); leave the recipe out")
    left = tuple(r.seed for r in record.repetitions if r.status in ("running", "interrupted"))
    return Job(folder, left, partial(resume_run, folder))


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with each `key=value` applied, in order."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise UsageError(f"setting is not of the form key=value ({setting}); as in --set optimizer.lr=0.01")
        recipe = recipe.with_setting(key, text)
    return recipe


def execute(job: Job, *, quiet: bool) -> RunRecord:
    """Train, with progress on the standard error; an interrupted run says how to go on."""
    console = error_console()
    console.quiet = quiet
    try:
        with use_progress(console, [f"seed {seed}" for seed in job.seeds]) as listener:
            return job.start(listeners=[listener])
    except KeyboardInterrupt:
        path = shlex.quote(str(job.folder.path))
        error_console().print(f"interrupted; go on with: weft run --resume {path}", soft_wrap=True)
        raise
