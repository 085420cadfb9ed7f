"""Data parallelism from recipe to record, on virtual ranks: one record, equal replicas, agreed stops, exact resume."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.cases import RankOrderGroup
from tests.distributed.virtual_plan import run_plan
from tests.training.planted import Recorder, TinyData, build_tiny, clock_of_ticks, ignore, module_with_dropout
from tests.training.test_run import tiny
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import run_virtual
from weft.errors import DivergedError, PeerLostError, RunFolderError
from weft.graph import State
from weft.records.record import Repetition, RunRecord
from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder, create_run_folder
from weft.specs import Batch, Mesh
from weft.torch_private import use_determinism
from weft.training import run as run_module
from weft.training.build import build_splits, build_task
from weft.training.checkpoint import latest_checkpoint
from weft.training.evaluation import evaluate
from weft.training.events import Event, Listener, StepEnded, StepStarted, StopTraining
from weft.training.interrupt import Interrupt
from weft.training.loop import take_step, train
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.results import hash_tensors
from weft.training.run import resume_run, run_recipe
from weft.training.sampling import SamplerState


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    """Held for all virtual ranks together: each of them switches it for the whole process."""
    with use_determinism():
        yield


@pytest.fixture(autouse=True)
def no_probes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run measures of itself in the end takes as long as the rest of it; one test looks at it."""
    if request.function is not test_one_record_by_rank_0_and_equal_replicas:
        for probe in ("probe_scaling", "probe_step", "probe_data"):
            monkeypatch.setattr(run_module, probe, lambda *_: {})


def replicas_of(group: AbstractGroup) -> DataParallel:
    return DataParallel(RankOrderGroup(group))


def run_on(
    size: int,
    recipe: Recipe,
    path: Path,
    *,
    seeds: Sequence[int] = (0,),
    listeners: Sequence[Listener] = (),
    topology: str = "native",
) -> list[RunRecord]:
    """A whole run on virtual ranks; what each returned."""
    folder = create_run_folder(path, recipe.name)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> RunRecord:
        return run_recipe(recipe, folder=folder, seeds=seeds, listeners=listeners, replicas=replicas)

    return work_on(size, recipe, topology, work)


def resume_on(size: int, path: Path, *, topology: str = "native") -> RunRecord:
    recipe = Recipe.from_dict(read_record(path).recipe)
    return work_on(size, recipe, topology, lambda _group, replicas: resume_run(RunFolder(path), replicas=replicas))[0]


def work_on(size: int, recipe: Recipe, topology: str, work: Callable[..., RunRecord]) -> list[RunRecord]:
    """Sums of a group follow the order of ranks, as those of servers do."""
    if topology == "native":
        return list(run_virtual(lambda group: work(group, replicas_of(group)), size).results)
    plan = f"data={size} topology={topology}"
    return list(run_plan(plan, work, spec=RunSpec.of(recipe, (0,))).results[:size])


# ---- the whole run


@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_record_by_rank_0_and_equal_replicas(size: int, tmp_path: Path) -> None:
    events = Recorder()
    records = run_on(size, tiny(), tmp_path / "run", listeners=[events])
    assert read_record(tmp_path / "run") == records[0]
    assert len({record.repetitions[0].hashes["parameters"] for record in records}) == 1
    first = records[0].repetitions[0]
    assert [record.repetitions[0].series["train/loss"] for record in records] == [first.series["train/loss"]] * size
    assert sum(isinstance(event, StepEnded) for event in events.events) == 5  # rank 0's, not every rank's
    for name in ("scaling_efficiency", "communication_overhead", "communication_exposed", "bytes_per_step"):
        assert math.isfinite(first.values[name]), name


def test_one_rank_and_several_agree_up_to_rounding(tmp_path: Path) -> None:
    recipe = tiny(optimizer="momentum", optimizer__lr=0.05)
    one, three = (run_on(size, recipe, tmp_path / str(size))[0].repetitions[0] for size in (1, 3))
    assert three.series["train/loss"] == pytest.approx(one.series["train/loss"], rel=1e-5)
    assert [e.samples for e in three.evaluations] == [e.samples for e in one.evaluations]


def test_every_seed_is_trained_together(tmp_path: Path) -> None:
    records = run_on(2, tiny(), tmp_path / "run", seeds=(0, 1))
    assert [repetition.status for repetition in records[0].repetitions] == ["done", "done"]
    assert records[0].repetitions[0].hashes != records[0].repetitions[1].hashes
    assert [r.hashes for r in records[1].repetitions] == [r.hashes for r in records[0].repetitions]


def test_a_plan_through_servers_gives_the_same_run(tmp_path: Path) -> None:
    direct = run_on(3, tiny(clip_norm=0.5), tmp_path / "direct")[0].repetitions[0]
    served = run_on(3, tiny(clip_norm=0.5), tmp_path / "served", topology="server(2)")[0].repetitions[0]
    assert served.hashes == direct.hashes
    assert served.series["train/loss"] == direct.series["train/loss"]


def test_all_ranks_of_a_mesh_hear_of_a_wish_to_stop() -> None:
    """A rank that holds another part of the model is in another group of replicas."""

    def program(group: AbstractGroup) -> tuple[bool, bool]:
        groups = MeshGroups(group, Mesh(group.rank, data=2, tensor=2))
        replicas = DataParallel(groups.replicas, world=groups.world, mesh=groups.mesh)
        found = replicas.agree_to_stop(group.rank == 0), replicas.agree_to_save(False)
        groups.close()
        return found

    assert run_virtual(program, 4).results == ((True, False),) * 4


# ---- joining, aligning, evaluating


def test_joining_takes_parameters_and_buffers_from_rank_0() -> None:
    def program(group: AbstractGroup) -> str:
        _, state = build_tiny()
        with torch.no_grad():
            for tensor in (*state.model.parameters.values(), *state.model.buffers.values()):
                tensor.add_(group.rank)
        replicas_of(group).join(state.model)
        return hash_tensors({**state.model.parameters, **state.model.buffers})

    _, state = build_tiny()
    assert set(run_virtual(program, 3).results) == {hash_tensors({**state.model.parameters, **state.model.buffers})}


def test_running_statistics_are_the_ranks_own_until_they_are_aligned() -> None:
    def program(group: AbstractGroup) -> tuple[Tensor, Tensor, int]:
        task, state = build_tiny(replicas=replicas_of(group))
        task.replicas.join(state.model)
        state, _ = take_step(task, state)
        own = state.model.buffers["1.running_mean"].clone()
        with task.replicas.use_consensus(state.model) as consensus:
            assert consensus.judges is task.replicas
        return own, state.model.buffers["1.running_mean"].clone(), int(state.model.buffers["1.num_batches_tracked"])

    (own0, aligned0, count0), (own1, aligned1, count1) = run_virtual(program, 2).results
    assert not torch.equal(own0, own1)
    assert torch.equal(aligned0, aligned1) and torch.equal(aligned0, (own0 + own1) / 2)
    assert count0 == count1 == 1


@pytest.mark.parametrize("size", [2, 3, 5])
def test_evaluation_by_several_ranks_has_the_bits_of_one(size: int) -> None:
    recipe = tiny()
    splits = build_splits(recipe)
    names = ("accuracy",)

    def program(group: AbstractGroup) -> dict[str, float]:
        task, state = build_task(recipe, splits, 0)
        return evaluate(task.executor, state.model, splits.train, names, replicas_of(group))

    task, state = build_task(recipe, splits, 0)
    alone = evaluate(task.executor, state.model, splits.train, names)
    assert len(splits.train) > 256 * 4  # five batches: one for each of five ranks, uneven numbers for fewer
    assert run_virtual(program, size).results == (alone,) * size


def test_scores_after_a_stop_between_evaluations_are_those_of_aligned_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regression: a listener's stop left every rank to score its share of the test split with statistics of its own.
    seen: list[set[str]] = []

    def watched(executor: Any, state: State, dataset: Any, names: Any, replicas: DataParallel) -> dict[str, float]:
        own = torch.frombuffer(bytearray.fromhex(hash_tensors(state.buffers)), dtype=torch.uint8)
        seen.append({bytes(part.tolist()).hex() for part in replicas.gather(own.clone())})
        return evaluate(executor, state, dataset, names, replicas)

    monkeypatch.setattr(run_module, "evaluate", watched)
    recipe = tiny(model="resnet", model__depth=8, model__width=2, epochs=0.3, batch_size=128)
    run_on(2, recipe, tmp_path / "run", listeners=[stop_after(1)])
    assert [len(hashes) for hashes in seen] == [1, 1]


# ---- stopping


def stop_after(step: int, kind: type[StepEnded] | type[StepStarted] = StepEnded) -> Listener:
    def listen(event: Event) -> None:
        if isinstance(event, kind) and event.progress.step == step:
            raise StopTraining("enough")

    return listen


def test_all_ranks_stop_after_the_step_that_one_wished_to_be_the_last(tmp_path: Path) -> None:
    records = run_on(3, tiny(), tmp_path / "run", listeners=[stop_after(2)])
    assert [record.repetitions[0].stop_reason for record in records] == ["enough", *["another rank wished to stop"] * 2]
    assert {len(record.repetitions[0].series["train/loss"]) for record in records} == {2}
    assert len({record.repetitions[0].hashes["parameters"] for record in records}) == 1


def test_a_wish_to_stop_before_a_step_is_heard_after_it() -> None:
    # Regression: Ctrl-C during an evaluation ended rank 0 before a step that the others then waited in for ever.
    def program(group: AbstractGroup) -> tuple[int, str]:
        task, state = build_tiny(module_with_dropout, replicas=replicas_of(group))
        task.replicas.join(state.model)
        listener = stop_after(2, StepStarted) if group.rank == 0 else ignore
        final, reason = train(task, state, emit=listener, save=ignore, clock=clock_of_ticks())
        return final.step, reason

    assert run_virtual(program, 2).results == ((3, "enough"), (3, "another rank wished to stop"))


@contextmanager
def interrupt_on(monkeypatch: pytest.MonkeyPatch, rank: int, after_step: int) -> Iterator[None]:
    """Ctrl-C that reaches one rank alone. Ranks build their interrupts in the order of ranks."""
    made: list[Interrupt] = []

    class Planted(Interrupt):
        def __call__(self, event: Event) -> None:
            if made.index(self) == rank and isinstance(event, StepEnded) and event.progress.step == after_step:
                self.requested = True
            super().__call__(event)

    @contextmanager
    def use_planted() -> Iterator[Interrupt]:
        made.append(Planted())
        yield made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "use_interrupt", use_planted)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Repetition:
    """A run on three ranks with dropout, not interrupted."""
    with use_determinism():
        return run_on(3, tiny(model__dropout=0.3), tmp_path_factory.mktemp("whole") / "run")[0].repetitions[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ctrl_c_on_any_rank_leaves_a_run_that_resumes_to_the_same_bits(
    rank: int, whole: Repetition, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(model__dropout=0.3)
    with interrupt_on(monkeypatch, rank, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe, tmp_path / "cut")
    assert read_record(tmp_path / "cut").repetitions[0].status == "interrupted"
    resumed = resume_on(3, tmp_path / "cut").repetitions[0]
    assert resumed.hashes == whole.hashes
    assert resumed.series["train/loss"] == whole.series["train/loss"]
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]


def test_each_rank_gets_its_running_statistics_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Regression: the ranks joined after the checkpoint was restored, and rank 0's statistics went to everyone.
    recipe = tiny(model="resnet", model__depth=8, model__width=2, epochs=0.3, batch_size=128)
    whole = run_on(2, recipe, tmp_path / "whole")[0].repetitions[0]
    with interrupt_on(monkeypatch, 0, 1), pytest.raises(KeyboardInterrupt):
        run_on(2, recipe, tmp_path / "cut")
    resumed = resume_on(2, tmp_path / "cut").repetitions[0]
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]
    assert resumed.hashes == whole.hashes


def test_servers_resume_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(clip_norm=0.5)
    whole = run_on(3, recipe, tmp_path / "whole", topology="server(2)")[0].repetitions[0]
    with interrupt_on(monkeypatch, 1, 2), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe, tmp_path / "cut", topology="server(2)")
    assert resume_on(3, tmp_path / "cut", topology="server(2)").repetitions[0].hashes == whole.hashes


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_at_the_very_next_sample(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny(optimizer="momentum", optimizer__lr=0.05)
    whole = run_on(1, recipe, tmp_path / "whole")[0].repetitions[0]
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(before, recipe, tmp_path / "cut")
    snapshot = latest_checkpoint(tmp_path / "cut/checkpoint/seed-0", ignore)
    assert snapshot is not None and snapshot.progress["sampler"] == {"epoch": 0, "offset": 3 * 128}
    resumed = resume_on(after, tmp_path / "cut").repetitions[0]
    assert resumed.series["train/loss"] == pytest.approx(whole.series["train/loss"], rel=1e-5)


def test_ranks_that_find_different_checkpoints_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(2, tiny(), tmp_path / "cut")

    def program(group: AbstractGroup) -> None:
        # As on two hosts that share no folder: the record has been copied, the checkpoints have not.
        folder = RunFolder(tmp_path / ("cut" if group.rank == 0 else "elsewhere"))
        resume_run(folder, replicas=replicas_of(group))

    create_run_folder(tmp_path / "elsewhere", "run")
    (tmp_path / "elsewhere/record.json").write_bytes((tmp_path / "cut/record.json").read_bytes())
    with pytest.raises(RunFolderError, match=r"steps: \[3, None\].*shared folder"):
        run_virtual(program, 2)


# ---- failing


@dataclass(frozen=True)
class OneBadSample(TinyData):
    """A sample that is not a number; its batch is dealt out in order, so it is known who gets it."""

    bad: int = 0

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        batch = super().take(indices, epoch)
        return Batch((batch.inputs[0].masked_fill((indices == self.bad)[:, None], math.nan),), batch.targets)


def errors_of_step(size: int, batch_size: int, bad: int) -> list[str]:
    def program(group: AbstractGroup) -> str:
        data = OneBadSample(10, bad=bad)
        options: dict[str, Any] = {"train": data, "shuffle": False, "batch_size": batch_size}
        task, state = build_tiny(module_with_dropout, replicas=replicas_of(group), **options)
        task.replicas.join(state.model)
        with pytest.raises((DivergedError, PeerLostError)) as caught:
            take_step(task, state)
        return f"{type(caught.value).__name__}: {caught.value}"

    return list(run_virtual(program, size).results)


def test_divergence_is_told_by_the_rank_that_has_it() -> None:
    first, second, third = errors_of_step(3, batch_size=6, bad=2)
    assert first.startswith("PeerLostError") and third.startswith("PeerLostError")
    assert second.startswith("DivergedError") and "first bad tensor: input 0" in second


def test_a_rank_without_samples_is_only_a_witness() -> None:
    # Regression: it took the sum of the losses for its own, and told of a bad tensor that it did not have.
    errors = errors_of_step(3, batch_size=2, bad=0)
    assert [error.partition(":")[0] for error in errors] == ["DivergedError", "PeerLostError", "PeerLostError"]


def test_the_first_error_of_a_run_is_the_divergence(tmp_path: Path) -> None:
    with pytest.raises((DivergedError, PeerLostError), match="not finite"):
        run_on(2, tiny(optimizer="sgd", optimizer__lr=1e38), tmp_path / "run")


# ---- shares


def test_more_ranks_than_samples_in_the_last_batch() -> None:
    """10 samples by 4: the last batch has 2, so ranks 2 and 3 have nothing to compute."""

    def program(group: AbstractGroup) -> tuple[str, list[float]]:
        task, state = build_tiny(module=lambda: nn.Linear(3, 1), replicas=replicas_of(group), accumulate=2)
        task.replicas.join(state.model)
        losses = []
        for _ in range(6):
            state, result = take_step(task, state)
            losses.append(result.loss)
        return hash_tensors(state.model.parameters), losses

    results = run_virtual(program, 4).results
    assert len({hash_ for hash_, _ in results}) == 1
    task, state = build_tiny(module=lambda: nn.Linear(3, 1))
    for loss in results[0][1]:
        state, result = take_step(task, state)
        assert loss == pytest.approx(result.loss, rel=1e-5)
    assert state.sampler == SamplerState(2, 0)
