"""Running a recipe: every repetition trained, recorded, checkpointed and, if need be, resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weft.errors import DivergedError, EncodingError, PeerLostError, RunFolderError, UsageError
from weft.records.record import Repetition, RunRecord
from weft.records.record_file import new_record, read_record, write_record
from weft.records.run_folder import RunFolder
from weft.specs import find_device
from weft.torch_private import use_determinism
from weft.training.build import build_task, check_recipe
from weft.training.checkpoint import latest_checkpoint
from weft.training.checkpointer import Checkpointer
from weft.training.evaluation import evaluate
from weft.training.events import Event, Listener, Notice, Stage
from weft.training.history import History
from weft.training.interrupt import use_interrupt
from weft.training.log import log_to
from weft.training.loop import TrainingState, train
from weft.training.probes import probe_data, probe_scaling, probe_step, probe_waiting, use_resource_watch
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas, SoloReplicas
from weft.training.results import hash_tensors, judge, to_target, values_of
from weft.training.snapshot import readers_of, restore
from weft.training.surroundings import Surroundings

__all__ = ["find_begun", "mark_failed", "resume_run", "run_recipe"]


def run_recipe(
    recipe: Recipe,
    *,
    folder: RunFolder,
    seeds: Sequence[int],
    listeners: Sequence[Listener] = (),
    replicas: AbstractReplicas | None = None,
    surroundings: Surroundings | None = None,
) -> RunRecord:
    """Train once per seed and write the record.

    A repetition that diverges counts as infinity and the others go on; the first failure is raised at the end. Ranks
    that train together all call this; rank 0 keeps the folder, and the record that the others return is a sketch.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when the checkpoint and the record have been written.
    """
    check_recipe(recipe)
    replicas, surroundings = replicas or SoloReplicas(), surroundings or Surroundings()
    device = surroundings.device or find_device(recipe.mutable.device)
    surroundings = replace(surroundings, device=device)
    record = _begin_record(recipe, seeds, surroundings.clock_rules, device, is_sketch=replicas.mesh.rank > 0)
    try:
        return _run_what_is_left(recipe, record, folder, listeners, replicas, surroundings, begun=())
    except UsageError:  # missing data, a batch larger than them: nothing has begun, so nothing stays
        folder.discard()
        raise


def find_begun(folder: RunFolder, seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds whose training has left checkpoints."""
    return tuple(seed for seed in seeds if _checkpoints_of(folder, seed).is_dir())


def resume_run(
    folder: RunFolder,
    *,
    listeners: Sequence[Listener] = (),
    replicas: AbstractReplicas | None = None,
    begun: Sequence[int] | None = None,
    surroundings: Surroundings | None = None,
) -> RunRecord:
    """Go on with a run that was interrupted or killed, from its last whole checkpoint, to the same bits.

    Args:
        begun: the seeds that go on from a checkpoint, as `find_begun` finds them before any rank has started. A rank
            that looked for itself, and came late, would find checkpoints of those that did not wait for it.
    """
    surroundings = surroundings or Surroundings()
    record = read_record(folder.path)
    if not record.recipe:
        raise RunFolderError(f"run was not made from a recipe ({folder.path}); nothing can be resumed")
    if all(_has_ended(repetition) for repetition in record.repetitions):
        raise RunFolderError(f"run has ended, nothing is left to resume ({folder.path}); start a new one")
    if record.clock_rules != surroundings.clock_rules:
        raise RunFolderError(f"run is a simulation, which keeps no checkpoints ({folder.path}); start a new one")
    recipe = _on_device(Recipe.from_dict(record.recipe), surroundings.device)
    check_recipe(recipe)
    begun = find_begun(folder, [repetition.seed for repetition in record.repetitions]) if begun is None else begun
    return _run_what_is_left(recipe, record, folder, listeners, replicas or SoloReplicas(), surroundings, begun)


def _on_device(recipe: Recipe, device: torch.device | None) -> Recipe:
    """The recipe as it is carried out: where a run goes on is not bound by where it began."""
    return recipe if device is None else replace(recipe, mutable=replace(recipe.mutable, device=str(device)))


def mark_failed(folder: RunFolder, error: Exception) -> None:
    """Record that what still ran has failed, where rank 0 could not: it died, or another's error ended it."""
    record = read_record(folder.path)
    infinite = to_target((), Recipe.from_dict(record.recipe).fixed.target)
    write_record(
        folder.path,
        replace(
            record,
            repetitions=tuple(
                repetition
                if _has_ended(repetition)
                else replace(repetition, status="failed", stop_reason=str(error), values=infinite)
                for repetition in record.repetitions
            ),
        ),
    )


def _begin_record(
    recipe: Recipe, seeds: Sequence[int], clock_rules: str, device: torch.device, *, is_sketch: bool
) -> RunRecord:
    """The record before its first repetition; a sketch, which nobody reads, does not look at the machine."""
    if is_sketch:
        record = RunRecord(recipe.name, {}, recipe.fixed_hash, "", clock_rules, {}, {}, {})
    else:
        record = new_record(recipe.name, recipe.to_dict(), recipe.fixed_hash)
        record = replace(record, clock_rules=clock_rules, machine={**record.machine, "device": str(device)})
    return replace(record, repetitions=tuple(Repetition(seed, "running", "", "") for seed in seeds))


def _run_what_is_left(
    recipe: Recipe,
    record: RunRecord,
    folder: RunFolder,
    listeners: Sequence[Listener],
    replicas: AbstractReplicas,
    surroundings: Surroundings,
    begun: Sequence[int],
) -> RunRecord:
    def write() -> None:
        if replicas.mesh.rank == 0:
            write_record(folder.path, record)

    write()
    failures: list[DivergedError | EncodingError | PeerLostError] = []
    for i, repetition in enumerate(record.repetitions):
        if _has_ended(repetition):
            continue
        try:
            goes_on = repetition.seed in begun
            ended = _train_once(recipe, repetition.seed, folder, listeners, replicas, surroundings, goes_on=goes_on)
        except (DivergedError, EncodingError, PeerLostError) as error:
            failures.append(error)
            infinite = to_target((), recipe.fixed.target)
            ended = replace(repetition, status="failed", stop_reason=str(error), values=infinite)
        record = replace(record, repetitions=(*record.repetitions[:i], ended, *record.repetitions[i + 1 :]))
        write()
        if failures and replicas.mesh.num_ranks > 1:  # the ranks have lost each other, and no other seed can be trained
            raise failures[0]
        if ended.status == "interrupted":
            replicas.sum(torch.zeros(1))  # a launcher that sees one rank leave may end the others: rank 0 writes first
            raise KeyboardInterrupt
    record = replace(record, verdicts=judge(recipe.rules, record))
    write()
    if failures:
        raise failures[0]
    return record


def _passing_over(emit: Listener) -> Callable[[str], None]:
    return lambda damage: emit(Notice(f"{damage}; looking for an older one"))


def _checkpoints_of(folder: RunFolder, seed: int) -> Path:
    return folder.checkpoint / f"seed-{seed}"


def _has_ended(repetition: Repetition) -> bool:
    return repetition.status in ("done", "failed")


def _train_once(
    recipe: Recipe,
    seed: int,
    folder: RunFolder,
    listeners: Sequence[Listener],
    replicas: AbstractReplicas,
    surroundings: Surroundings,
    *,
    goes_on: bool,
) -> Repetition:
    """One training from one seed, or the rest of it, from its last whole checkpoint."""
    checkpoints, now = _checkpoints_of(folder, seed), surroundings.now
    history = History()
    watching = use_resource_watch(is_idle=surroundings.is_virtual)
    with use_interrupt() as interrupt, use_determinism(), watching as watch:
        heard = [log_to(folder, seed), *listeners] if replicas.mesh.rank == 0 else []
        emit, tell = _in_turn([history, watch, surroundings.listen, *heard, interrupt]), _in_turn(heard)
        tell(Stage("loading data"))
        started = now()
        splits = surroundings.load(recipe)
        task, state = build_task(recipe, splits, seed, replicas, surroundings.device)
        task = surroundings.prepare(task)
        replicas.join(state.model)  # before a checkpoint is read, of which a rank then knows what it needs
        snapshot = None
        if not surroundings.is_virtual:
            readers = readers_of(replicas, state.model)
            snapshot = latest_checkpoint(checkpoints if goes_on else None, _passing_over(emit), readers)
        if snapshot:
            state = restore(state, snapshot)
            replicas.remember(snapshot.step, snapshot.entries)
            started = snapshot.progress["started"]
            history.restore(snapshot.progress["history"])
            emit(Notice(f"resumed from step {state.step}"))
        del snapshot  # the tensors that were copied from it
        carried = lambda: {"started": started, "history": history.to_dict()}  # noqa: E731
        save = Checkpointer(checkpoints, recipe.mutable, carried, replicas)
        keep = _keep_nothing if surroundings.is_virtual else save
        state, reason = train(task, state, emit=emit, save=keep, clock=lambda: now() - started)
        wall_clock = now() - started
        if not surroundings.is_virtual:
            save.write(state)
        if replicas.sum(torch.tensor([float(interrupt.requested)])).item():
            return Repetition(seed, "interrupted", reason, splits.checksum())
        with replicas.use_consensus(state.model) as consensus:
            judges = consensus.judges
            scores = evaluate(task.executor, state.model, task.splits.test, task.metrics, judges) if judges else {}
            whole = replicas.placement.whole({f"parameter/{n}": p for n, p in state.model.parameters.items()})
            hashes = {"parameters": hash_tensors({n.removeprefix("parameter/"): p for n, p in whole.items()})}

    values = values_of(history, task.target, wall_clock, {f"test/{name}": score for name, score in scores.items()})
    is_alone = replicas.mesh.num_ranks == 1
    tell(Stage("measuring one step" if is_alone else "measuring one rank alone, for the scaling efficiency"))
    probed = {
        "optimizer_memory": _most(replicas, state.optimizer.num_bytes),
        **probe_waiting(task),
        **(probe_data(task) if replicas.mesh.rank == 0 else {}),
        **probe_scaling(task, state, values["step_time"], now),
        **({} if surroundings.is_virtual else probe_step(task, state, values["throughput"])),
    }
    return Repetition(
        seed=seed,
        status="done",
        stop_reason=reason,
        data_checksum=splits.checksum(),
        evaluations=tuple(history.evaluations),
        values={
            **values,
            **consensus.values,
            **watch.values,
            **probed,
        },
        series={
            "train/loss": tuple(history.losses),
            "step_time": tuple(history.step_seconds),
            **consensus.series,
        },
        hashes=hashes,
    )


def _most(replicas: AbstractReplicas, number: int) -> float:
    """The largest of all ranks' numbers."""
    return max(float(found) for found in replicas.gather(torch.tensor(number)))


def _keep_nothing(_state: TrainingState) -> None:
    pass


def _in_turn(listeners: Sequence[Listener]) -> Listener:
    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit
