"""From what `weft run` was given to a training that can be started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import RunFolderError, UsageError
from weft.recipes import find_recipe
from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder, create_run_folder, open_run_folder
from weft.specs import parse_plan
from weft.training.build import check_recipe
from weft.training.recipe import Recipe
from weft.training.run import find_begun

__all__ = ["Job", "choose_recipe", "new_job", "resumed_job", "with_device", "with_plan", "with_settings"]


@dataclass(frozen=True)
class Job:
    """A recipe, a run folder, and the seeds that are still to be trained.

    Args:
        begun: of a resumed run, the seeds that go on from a checkpoint.
        replay: the run that is repeated.
    """

    recipe: Recipe
    folder: RunFolder
    seeds: tuple[int, ...]
    is_resumed: bool
    replay: Path | None = None
    begun: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "folder": str(self.folder.path),
            "seeds": list(self.seeds),
            "is_resumed": self.is_resumed,
            "replay": None if self.replay is None else str(self.replay),
            "begun": list(self.begun),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Job":
        folder = RunFolder(Path(data["folder"]))
        replay = None if data["replay"] is None else Path(data["replay"])
        recipe, seeds, begun = Recipe.from_dict(data["recipe"]), tuple(data["seeds"]), tuple(data["begun"])
        return Job(recipe, folder, seeds, data["is_resumed"], replay, begun)


def choose_recipe(
    name: str | None,
    settings: Sequence[str],
    plan: str | None,
    workers: int | None,
    num_started: int | None = None,
    *,
    device: str | None = None,
) -> Recipe:
    """The recipe that the words of a command mean."""
    if name is None:
        raise UsageError("no recipe was given; name one that `weft list` shows, or use --resume")
    return with_device(with_plan(with_settings(find_recipe(name), settings), plan, workers, num_started), device)


def new_job(recipe: Recipe, *, num_seeds: int, first_seed: int, out: Path | None) -> Job:
    """A run that starts from nothing. What is wrong with the recipe is said before a folder is made."""
    check_recipe(recipe)
    folder = create_run_folder(out, recipe.name)
    return Job(recipe, folder, tuple(range(first_seed, first_seed + num_seeds)), is_resumed=False)


def resumed_job(
    path: Path,
    name: str | None,
    plan: str | None,
    workers: int | None,
    given: Sequence[str],
    num_started: int | None = None,
    *,
    device: str | None = None,
) -> Job:
    """The rest of a run. It may go on with another plan and on another device; options that would change anything else
    are refused."""
    if given:
        raise UsageError(f"a resumed run keeps its settings ({', '.join(given)}); leave them out, or start a new run")
    folder = open_run_folder(path)
    record = read_record(path)
    if name is not None and find_recipe(name).name != record.name:
        raise UsageError(f"run is of another recipe ({path}: {record.name}, given: {name}); leave the recipe out")
    if not record.recipe:
        raise UsageError(f"run was not made from a recipe ({path}); nothing can be resumed")
    left = tuple(r.seed for r in record.repetitions if r.status in ("running", "interrupted"))
    if not left:  # before any rank is started
        raise RunFolderError(f"run has ended, nothing is left to resume ({path}); start a new one")
    recipe = with_device(with_plan(Recipe.from_dict(record.recipe), plan, workers, num_started), device)
    check_recipe(recipe)
    return Job(recipe, folder, left, is_resumed=True, begun=find_begun(folder, left))


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with each `key=value` applied, in order."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise UsageError(f"setting is not of the form key=value ({setting}); as in --set optimizer.lr=0.01")
        recipe = recipe.with_setting(key, text)
    return recipe


def with_device(recipe: Recipe, device: str | None) -> Recipe:
    """The recipe with another wish for a device; short for `device=...` among the settings."""
    return recipe if device is None else replace(recipe, mutable=replace(recipe.mutable, device=device))


def with_plan(recipe: Recipe, plan: str | None, workers: int | None, num_started: int | None = None) -> Recipe:
    """The recipe with another plan; `workers` is short for `data=N`, and may fill in what the plan leaves open.

    Args:
        num_started: processes that another launcher has started, which may be servers too. They are as many workers
            where nothing says more: not the command, and not the recipe's own plan, which needs another number.
    """
    if plan is None and workers is None and num_started in (None, recipe.mutable.plan.roles.num_processes):
        return recipe
    text = plan or ""
    if workers is None and "data=" not in text:
        workers = num_started
    if workers is not None and "data=" in text and parse_plan(text).data != workers:
        raise UsageError(f"plan and workers differ (plan: {text}, workers: {workers}); give one of them")
    if workers is not None and "data=" not in text:
        text = f"data={workers} {text}"
    chosen = parse_plan(text)
    if num_started not in (None, chosen.roles.num_processes):
        numbers = f"plan: {chosen.roles.num_processes}, started: {num_started}"
        raise UsageError(f"plan needs another number of processes than were started ({numbers}); start as many")
    return replace(recipe, mutable=replace(recipe.mutable, plan=chosen))
