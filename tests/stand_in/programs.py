"""What ranks do on the stand-in accelerator, each beside what they do on the CPU: the bits must be the same."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.distributed.group import contract
from tests.distributed.woven import Script
from tests.stand_in import accelerator, small
from tests.stand_in.moved_group import MovedGroup
from tests.stand_in.small import folder_for, small_recipe
from weft.distributed.group.staged import StagedGroup
from weft.distributed.place import LaunchedPlace, find_launch, open_group
from weft.distributed.realise import RunSpec, realise
from weft.distributed.script.saving.saving import load, save, state_dict
from weft.distributed.script.weaving.weave import weave
from weft.distributed.virtual import run_virtual
from weft.records.record import Repetition
from weft.records.run_folder import RunFolder, create_run_folder
from weft.simulation.simulation import simulate
from weft.specs import find_device, list_devices
from weft.torch_private import use_determinism
from weft.training import run as running
from weft.training.build import build_splits, build_task
from weft.training.datasets import Splits
from weft.training.events import Event, Listener, StepEnded
from weft.training.history import History
from weft.training.loop import take_step, train
from weft.training.recipe import Recipe
from weft.training.results import hash_tensors
from weft.training.run import resume_run, run_recipe
from weft.training.snapshot import restore, take_snapshot
from weft.training.surroundings import Surroundings

__all__ = ["be_alone", "keep_contract", "save_and_resume", "save_scripts", "train_plans", "weave_scripts"]


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
        assert replicas.sum(torch.zeros(1, device=place.device)).device == place.device
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
    """Train in one go on the CPU; interrupt a training on the stand-in, and go on with it there. The hashes of both."""
    accelerator.register()
    vars(running)["probe_scaling"] = lambda *_: {}  # it takes a second, and changes nothing
    found = {}
    for number, plan in enumerate(plans):
        whole, cut = Path(folder) / f"{number}-whole", Path(folder) / f"{number}-cut"
        expected = _run(small_recipe(plan, device="cpu", epochs=2), _meet(whole.name), whole)
        recipe = small_recipe(plan, device=accelerator.NAME, epochs=2, checkpoint_steps=1)
        with suppress(KeyboardInterrupt):
            _run(recipe, _meet(cut.name), cut, listeners=(InterruptAfter(3),))
        found[plan] = expected.hashes, _resume(recipe, _meet(f"{cut.name}-again"), cut).hashes
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


def _resume(recipe: Recipe, place: LaunchedPlace, run: Path) -> Repetition:
    place = place.on(recipe.mutable.device)
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


def save_scripts(plans: list[str], folder: str) -> list[Any]:
    """A user's checkpoints, of models on the stand-in: under each plan the weights two steps after one was saved, and
    again two steps after it was loaded."""
    accelerator.register()
    return [_save_and_go_back(plan, Path(folder) / str(number)) for number, plan in enumerate(plans)]


def _save_and_go_back(plan: str, path: Path) -> list[Any]:
    device = accelerator.NAME
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 70), torch.nn.Dropout(0.5), torch.nn.Linear(70, 1)).to(device)
    model, optimizer, _ = weave(model, torch.optim.AdamW(model.parameters()), None, plan)
    ends: list[Any] = []
    for step in (0, 1, 2, 1, 2):
        if step == 1 and not ends:
            save(path, model=model, optimizer=optimizer)
        elif step == 1:
            load(path, model=model, optimizer=optimizer)
        optimizer.zero_grad()
        model(torch.full((4, 6), step + 1.0).to(device)).square().mean().backward()
        optimizer.step()
        if step == 2:
            ends.append([tensor.flatten().tolist() for tensor in state_dict(model).values()])
    return ends


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


OPTIMIZERS = ("sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "tests.stand_in.small:nadam")
SIMULATED = ("data=3", "data=2 consistency=gossip(ring,mix=pair)", "data=2 consistency=async topology=server")


def be_alone(folder: str) -> dict[str, Any]:
    """One rank: what each of these gave on the CPU, and on the stand-in."""
    accelerator.register()
    runs = Path(folder)
    return {
        "devices": [str(find_device()), str(find_device("standin", 7)), list(list_devices())],
        "refused": [_refusal(stray_tensor), _refusal(lambda: find_device("standin:1"))],
        "whole": [_whole_run(device, runs) for device in ("cpu", accelerator.NAME)],
        "optimizers": {name: [_steps(name, device) for device in DEVICES] for name in OPTIMIZERS},
        "simulated": {plan: [_simulated(plan, device, runs) for device in DEVICES] for plan in SIMULATED},
        "moved": _move_on(runs),
    }


DEVICES = ("cpu", accelerator.NAME)


def stray_tensor() -> None:
    """Train a model that makes a tensor of the CPU by itself: the fault that all of this is there to find."""
    recipe = small_recipe(model=f"{small.__name__}:stray", device=accelerator.NAME)
    task, state = build_task(recipe, build_splits(recipe), 0)
    take_step(task, state)


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def _whole_run(device: str, runs: Path) -> dict[str, Any]:
    """A run with all its measurements, and how often the clock waited for the device."""
    before = accelerator.num_synchronised
    recipe = small_recipe(device=device, accumulate=2, clip_norm=1.0)
    record = run_recipe(recipe, folder=create_run_folder(runs / f"whole-{device}", recipe.name), seeds=(0,))
    (end,) = record.repetitions
    return {
        "hashes": end.hashes,
        "losses": end.series["train/loss"],
        "values": {name: end.values[name] for name in ("test/accuracy", "flops_per_sample")},
        **{name: end.values[name] for name in ("share_of_peak", "peak_tensor_memory")},
        "num_steps": len(end.series["step_time"]),
        "num_synchronised": accelerator.num_synchronised - before,
        "device": record.machine["device"],
    }


def _steps(optimizer: str, device: str) -> list[str]:
    """Some steps of an optimizer, with a checkpoint in the middle that another state is restored from."""
    recipe = small_recipe(device=device, optimizer=optimizer, optimizer__lr=0.01)
    with use_determinism():
        task, state = build_task(recipe, build_splits(recipe), 0)
        for _ in range(2):
            state, _ = take_step(task, state)
        snapshot = take_snapshot(state, {})
        task, state = build_task(recipe, task.splits, 0)
        state = restore(state, snapshot)
        state, _ = take_step(task, state)
    slots = {f"{name}/{slot}": t for name, own in state.optimizer.slots.items() for slot, t in own.items()}
    return [hash_tensors(state.model.parameters), hash_tensors(slots)]


def _simulated(plan: str, device: str, runs: Path) -> list[Any]:
    recipe = small_recipe(plan, device=device)
    folder = create_run_folder(runs / f"simulated-{SIMULATED.index(plan)}-{device}", recipe.name)
    (end,) = simulate(recipe, folder=folder, compute=0.01).record.repetitions
    return [end.hashes, end.series["train/loss"], end.series["step_time"]]


def _move_on(runs: Path) -> list[Any]:
    """A run that began on the CPU goes on on the stand-in; without dropout, which draws anew on another device."""
    recipe = small_recipe(model="mlp", checkpoint_steps=1, device="cpu")
    whole = run_recipe(recipe, folder=create_run_folder(runs / "stayed", recipe.name), seeds=(0,))
    folder = create_run_folder(runs / "moved", recipe.name)
    with suppress(KeyboardInterrupt):
        run_recipe(recipe, folder=folder, seeds=(0,), listeners=(InterruptAfter(3),))
    moved = resume_run(folder, surroundings=Surroundings(device=find_device(accelerator.NAME)))
    return [record.repetitions[0].hashes for record in (whole, moved)]
