"""Repeating a run: the job that does so, and whether it ended with the same bits."""

from collections.abc import Sequence
from pathlib import Path

from weft.errors import UsageError
from weft.records.record import RunRecord
from weft.records.record_file import read_record
from weft.records.run_folder import create_run_folder, open_run_folder
from weft.runs.job import Job
from weft.training.build import check_recipe
from weft.training.recipe import Recipe

__all__ = ["compare_replay", "replayed_job"]


def replayed_job(path: Path, out: Path | None, given: Sequence[str]) -> Job:
    """A new run of the recipe, plan and seeds of another, whose servers and pairs decide as they did there."""
    if given:
        raise UsageError(f"a replayed run keeps its settings ({', '.join(given)}); leave them out, or start a new run")
    open_run_folder(path)
    record = read_record(path)
    seeds = tuple(repetition.seed for repetition in record.repetitions if repetition.status == "done")
    if not record.recipe or not seeds:
        raise UsageError(f"run has nothing that can be replayed ({path}); give one that ended, from a recipe")
    recipe = Recipe.from_dict(record.recipe)
    check_recipe(recipe)
    return Job(recipe, create_run_folder(out, recipe.name), seeds, is_resumed=False, replay=path.absolute())


def compare_replay(replay: Path, again: RunRecord) -> tuple[bool, str]:
    """Whether every repetition ended with the parameters of the run that it repeats, to the last bit; in words too."""
    before = {repetition.seed: repetition.hashes for repetition in read_record(replay).repetitions}
    differ = [repetition.seed for repetition in again.repetitions if repetition.hashes != before.get(repetition.seed)]
    if differ:
        return False, f"replay differs from {replay} (seeds: {', '.join(map(str, differ))})"
    return True, f"replay ended with the parameters of {replay}, to the last bit"
