"""What ranks do on the stand-in accelerator, each beside what they do on the CPU: the bits must be the same."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.distributed.group import contract
from tests.distributed.woven import Script
from tests.stand_in import accelerator
from tests.stand_in.moved_group import MovedGroup
from tests.stand_in.small import folder_for, small_recipe
from weft.distributed.group.staged import StagedGroup
from weft.distributed.place import LaunchedPlace, find_launch, open_group
from weft.distributed.realise import RunSpec, realise
from weft.distributed.virtual import run_virtual
from weft.records.record import Repetition
from weft.records.run_folder import RunFolder
from weft.torch_private import use_determinism
from weft.training.build import build_splits, build_task
from weft.training.datasets import Splits
from weft.training.events import Event, Listener, StepEnded
from weft.training.history import History
from weft.training.loop import train
from weft.training.recipe import Recipe
from weft.training.results import hash_tensors
from weft.training.run import resume_run, run_recipe
from weft.training.surroundings import Surroundings

__all__ = ["keep_contract", "save_and_resume", "train_plans", "weave_scripts"]


def _meet(name: str) -> LaunchedPlace:
    """The place of this rank, in a folder of its own for each time that ranks meet."""
    launch = find_launch()
    os.environ["WEFT_SECRET"] = "ab" * 32
    return LaunchedPlace(replace(launch, meeting=str(folder_for(Path(launch.meeting), name))))


def train_plans(plans: list[str], folder: str) -> dict[str, Any]:
    """Train each plan on the CPU and then on the stand-in, which decides as was decided there; what both ended with."""
    accelerator.register()
    splits, found = build_splits(small_recipe()), {}
    for number, plan in enumerate(plans):
        runs = [Path(folder) / str(number) / device for device in ("cpu", accelerator.NAME)]
        found[plan] = [
            _train(small_recipe(plan, device=run.name, clip_norm=1.0), splits, run, replay=runs[0] if place else None)
            for place, run in enumerate(runs)
        ]
    return found


def _train(recipe: Recipe, splits: Splits, run: Path, replay: Path | None) -> list[Any]:
    """One training as one of the ranks; its losses, and the model and optimizer state that it ends with."""
    run.mkdir(parents=True, exist_ok=True)
    place = _meet(f"{run.parent.name}-{run.name}").on(recipe.mutable.device)
    history = History()
    with (
        use_determinism(),
        realise(recipe.mutable.plan, place, RunSpec.of(recipe, (0,), run=run, replay=replay)) as replicas,
    ):
        assert replicas is not None
        task, state = build_task(recipe, splits, 0, replicas, place.device)
        replicas.join(state.model)
        state, _ = train(task, state, emit=history, save=lambda _: None)
        replicas.sum(torch.zeros(1))
        with replicas.use_consensus(state.model):
            own = {f"{name}/{slot}": t for name, slots in state.optimizer.slots.items() for slot, t in slots.items()}
            assert {t.device.type for t in (*state.model.parameters.values(), *own.values())} == {place.device.type}
            hashes = [hash_tensors(tensors) for tensors in (state.model.parameters, state.model.buffers, own)]
    return [hashes, history.losses, [evaluation.values for evaluation in history.evaluations]]


class InterruptAfter:
    """Presses Ctrl-C after so many steps of rank 0, which alone listens."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded) and event.progress.step == self._step:
            os.kill(os.getpid(), signal.SIGINT)


def save_and_resume(plans: list[str], folder: str) -> dict[str, Any]:
    """Interrupt a training on one device and go on with it on another; the hashes of its end, and of one in one go."""
    accelerator.register()
    found = {}
    for number, plan in enumerate(plans):
        hashes = []
        for name, first, second in (("whole", "cpu", ""), ("cut", accelerator.NAME, accelerator.NAME)):
            run = Path(folder) / str(number) / name
            recipe = small_recipe(plan, device=first, checkpoint_steps=1)
            if not second:
                hashes.append(_run(recipe, _meet(f"{number}-{name}"), run).hashes)
                continue
            with suppress(KeyboardInterrupt):
                _run(recipe, _meet(f"{number}-{name}"), run, listeners=(InterruptAfter(3),))
            hashes.append(_resume(recipe, second, _meet(f"{number}-{name}-again"), run).hashes)
        found[plan] = hashes
    return found


def _run(recipe: Recipe, place: LaunchedPlace, run: Path, listeners: tuple[Listener, ...] = ()) -> Repetition:
    run.mkdir(parents=True, exist_ok=True)
    place = place.on(recipe.mutable.device)
    with realise(recipe.mutable.plan, place, RunSpec.of(recipe, (0,), run=run)) as replicas:
        surroundings = Surroundings(device=place.device)
        folder = RunFolder(run)
        record = run_recipe(
            recipe, folder=folder, seeds=(0,), listeners=listeners, replicas=replicas, surroundings=surroundings
        )
    return record.repetitions[0]


def _resume(recipe: Recipe, device: str, place: LaunchedPlace, run: Path) -> Repetition:
    place = place.on(device)
    with realise(recipe.mutable.plan, place, RunSpec.of(recipe, (0,), run=run)) as replicas:
        assert replicas is not None
        surroundings = Surroundings(device=place.device)
        record = resume_run(RunFolder(run), replicas=replicas, begun=(0,), surroundings=surroundings)
    return record.repetitions[0]


def weave_scripts(plans: list[str]) -> list[Any]:
    """A user's loop, woven, on the CPU and on the stand-in."""
    accelerator.register()
    launch = find_launch()
    found = []
    for number, plan in enumerate(plans):
        for device in ("cpu", accelerator.NAME):
            meeting = folder_for(Path(launch.meeting), f"{number}-{device}")
            os.environ["WEFT_MEETING"] = str(meeting)
            found.append(Script(plan=plan, device=device).run())
    return found


def keep_contract() -> list[contract.Report]:
    """The contract of groups with every tensor of a call on the stand-in, over shared memory and on virtual ranks."""
    accelerator.register()
    device = torch.device(accelerator.NAME, 0)
    group = open_group(find_launch(), "shared_memory", timeout=30)
    try:
        own = contract.everything(MovedGroup(StagedGroup(group, device)))
    finally:
        group.close()
    return [own, *run_virtual(lambda rank: contract.everything(MovedGroup(StagedGroup(rank, device))), 3).results]
