"""A run with a codec that is cut goes on to the same bits; what was not sent yet is in the checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.placement.cases import RankOrderGroup
from tests.distributed.placement.test_data_parallel import interrupt_on
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp, with_settings
from tests.training.test_run import tiny
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.codecs.signs import SignCodec
from weft.distributed.consistency.gossip import Gossip
from weft.distributed.consistency.local import LocalAveraging
from weft.distributed.consistency.server import ServedReplicas
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel, MeshGroups
from weft.distributed.realise import RunSpec
from weft.distributed.virtual import run_virtual
from weft.records.record import Repetition
from weft.records.run_folder import RunFolder, create_run_folder
from weft.torch_private import use_determinism
from weft.training import run as run_module
from weft.training.build import build_task
from weft.training.checkpoint import latest_checkpoint, write_checkpoint
from weft.training.loop import Task, TrainingState, take_step
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.results import hash_tensors
from weft.training.run import resume_run, run_recipe
from weft.training.snapshot import ranks_of, restore, take_snapshot

RECIPE = tiny(optimizer="momentum", optimizer__lr=0.05, batch_size=64, evaluate_every=1.0, epochs=0.6)

RunOn = Callable[[Callable[[AbstractReplicas], Repetition]], Repetition]


@pytest.fixture(autouse=True)
def quick_and_determinate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for probe in ("probe_scaling", "probe_step", "probe_data"):
        monkeypatch.setattr(run_module, probe, lambda *_: {})
    with use_determinism():
        yield


def on_plan(plan: str) -> RunOn:
    def run(work: Callable[[AbstractReplicas], Repetition]) -> Repetition:
        found: Repetition = run_plan(plan, lambda _group, r: work(r), spec=RunSpec.of(RECIPE, (0,))).results[0]
        return found

    return run


def with_residuals(size: int) -> RunOn:
    """Synchronous ranks with a codec that keeps what it did not send."""

    def run(work: Callable[[AbstractReplicas], Repetition]) -> Repetition:
        def program(group: AbstractGroup) -> Repetition:
            return work(DataParallel(RankOrderGroup(group), codec=SignCodec()))

        found: Repetition = run_virtual(program, size).results[0]
        return found

    return run


def start(path: Path, run: RunOn, recipe: Recipe = RECIPE) -> Repetition:
    folder = create_run_folder(path, recipe.name)
    return run(lambda replicas: run_recipe(recipe, folder=folder, seeds=(0,), replicas=replicas).repetitions[0])


def resume(path: Path, run: RunOn) -> Repetition:
    return run(lambda replicas: resume_run(RunFolder(path), replicas=replicas).repetitions[0])


def cut(path: Path, run: RunOn, monkeypatch: pytest.MonkeyPatch) -> Repetition:
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        start(path / "cut", run)
    return resume(path / "cut", run)


PLANS = [
    "data=3 topology=direct",
    "data=3 topology=server(2)",
    "data=3 consistency=local(2) topology=direct",
    "data=2 consistency=local(2,outer=nesterov) topology=direct",
    "data=3 consistency=elastic(2)",
    "data=3 consistency=gossip(ring)",
]


@pytest.mark.parametrize("codec", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", PLANS)
def test_a_run_that_is_cut_goes_on_to_the_same_bits(
    plan: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_plan(f"{plan} compress={codec}")
    assert cut(tmp_path, run, monkeypatch).hashes == start(tmp_path / "whole", run).hashes


WITH_MEMORY = [
    "data=3 topology=direct compress=topk(0.05)",
    "data=2 compress=powersgd(2)",
    "data=2 compress=dgc(0.05,warmup=4)",
    "data=3 topology=server(2) compress=onebit",
    "data=3 topology=server(2) compress=qsgd(4)",
    "data=3 consistency=local(2) topology=direct compress=topk(0.05)",
    "data=2 consistency=local(2) compress=powersgd(2)",
    "data=2 consistency=local(2,after=2) compress=sign",
    "data=3 consistency=gossip(ring) compress=topk(0.1)",
    "data=3 consistency=gossip(ring,mix=after) compress=qsgd(8)",
    "shard=2 compress=topk(0.05)",
    "shard=2 shard_level=2 compress=onebit",
    "shard=2 shard_level=3 compress=topk(0.05)",
    "data=2 shard=2 shard_level=3 compress=randomk(0.1)",
    "data=2 tensor=2 compress=topk(0.05)",
    "data=2 pipeline=2 compress=topk(0.05)",
    "data=2 pipeline=2 consistency=local(2) compress=topk(0.05)",
]


@pytest.mark.parametrize("plan", WITH_MEMORY)
def test_a_run_goes_on_with_what_was_not_sent(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_plan(plan)
    assert cut(tmp_path, run, monkeypatch).hashes == start(tmp_path / "whole", run).hashes


FORGETFUL = [
    ("data=3 topology=server(2) compress=onebit", ServedReplicas, "memory"),
    ("data=2 consistency=local(2) compress=topk(0.05)", LocalAveraging, "memory"),
    ("shard=2 shard_level=2 compress=topk(0.05)", DataParallel, "memory"),
]


@pytest.mark.parametrize(("plan", "owner", "method"), FORGETFUL)
def test_a_memory_that_is_not_saved_is_found(
    plan: str, owner: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = on_plan(plan)
    whole = start(tmp_path / "whole", run)
    monkeypatch.setattr(owner, method, lambda self: {})
    assert cut(tmp_path, run, monkeypatch).hashes != whole.hashes


def test_estimates_that_are_not_saved_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixing keeps the mean: what is known of a rank shows in later gradients alone."""
    run, recipe = on_plan("data=3 consistency=gossip(ring) compress=topk(0.1)"), with_settings(RECIPE, epochs=1.2)
    whole = start(tmp_path / "whole", run, recipe)
    monkeypatch.setattr(Gossip, "memory", lambda self: {})
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        start(tmp_path / "cut", run, recipe)
    assert resume(tmp_path / "cut", run).hashes != whole.hashes


CHANGED = [
    ("shard=2 shard_level=3 compress=topk(0.05)", "data=3 compress=topk(0.05)"),
    ("data=2 compress=topk(0.05)", "shard=3 shard_level=2 compress=topk(0.05)"),
    ("data=3 topology=server(2) compress=onebit", "data=2 topology=server compress=onebit"),
    ("data=3 consistency=local(2) compress=topk(0.05)", "data=2 consistency=local(2) compress=topk(0.05)"),
    ("data=3 consistency=gossip(ring) compress=topk(0.1)", "data=2 consistency=gossip(ring) compress=topk(0.1)"),
    ("data=3 consistency=gossip(ring)", "data=3 consistency=gossip(ring) compress=sign"),
    ("data=2 compress=topk(0.05)", "data=2 consistency=async topology=server compress=topk(0.05)"),
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_what_was_not_sent_goes_on_with_another_plan(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        start(tmp_path / "cut", on_plan(before))
    assert resume(tmp_path / "cut", on_plan(after)).status == "done"


def test_a_checkpoint_of_what_ranks_were_sent_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: of the servers' weights, the digits that ranks see."""
    run = on_plan("data=3 topology=server(2) compress=bf16")
    whole = start(tmp_path / "whole", run)
    monkeypatch.setattr(ServedReplicas, "memory", lambda self: {})
    assert cut(tmp_path, run, monkeypatch).hashes != whole.hashes


def test_residuals_are_part_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_residuals(2)
    whole = start(tmp_path / "whole", run)
    assert cut(tmp_path / "right", run, monkeypatch).hashes == whole.hashes
    monkeypatch.setattr(DataParallel, "memory", lambda self: {})
    assert cut(tmp_path / "wrong", run, monkeypatch).hashes != whole.hashes


def test_the_sum_of_residuals_survives_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        start(tmp_path / "cut", with_residuals(2))
    folder = tmp_path / "cut/checkpoint/seed-0"
    alone = latest_checkpoint(folder, pytest.fail)
    assert alone is not None
    saved = {name: entry for name, entry in alone.entries.items() if name.startswith("codec/residual/")}
    assert saved

    def program(group: AbstractGroup) -> dict[str, torch.Tensor]:
        replicas = DataParallel(group, codec=(codec := SignCodec()))
        snapshot = latest_checkpoint(folder, pytest.fail, ranks_of(replicas))
        assert snapshot is not None
        replicas.remember(3, snapshot.entries)
        return {name: kept.tensor.clone() for name, kept in codec.memory().items()}

    three = run_virtual(program, 3).results
    for name, entry in saved.items():
        torch.testing.assert_close(sum(kept[name.removeprefix("codec/")] for kept in three), entry.tensor)


@pytest.mark.parametrize("after", ["none", "bf16"])
def test_a_run_goes_on_with_another_codec(after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plan = "fp16" if after == "none" else "none", "data=2 consistency=local(2) topology=direct compress="
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        start(tmp_path / "cut", on_plan(plan + before))
    assert resume(tmp_path / "cut", on_plan(plan + after)).status == "done"


@pytest.mark.parametrize("consistency", ["local(4)", "local(4,outer=nesterov)"])
@pytest.mark.parametrize("compress", ["bf16", "topk(0.05)"])
def test_local_ranks_that_ended_between_two_meetings_go_on(compress: str, consistency: str, tmp_path: Path) -> None:
    # Regressions: the end of a training saves wherever it is, and ranks that then had no common weights were refused;
    # later they went on from the mean of where they were, though what was kept back is of the last meeting's weights.
    case = case_of(small_mlp(), f"data=2 consistency={consistency} compress={compress}", 1)

    def begin(group: AbstractGroup) -> tuple[Task, TrainingState]:
        replicas = replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        return task, state

    def take_steps(task: Task, state: TrainingState, num_steps: int) -> TrainingState:
        for _ in range(num_steps):
            state, _ = take_step(task, state)
        return state

    def go_through(group: AbstractGroup) -> str:
        return hash_tensors(take_steps(*begin(group), 9).model.parameters)

    def save(group: AbstractGroup) -> None:
        task, state = begin(group)
        state = take_steps(task, state, 6)
        write_checkpoint(tmp_path, take_snapshot(state, {}, task.replicas), ranks_of(task.replicas))

    def go_on(group: AbstractGroup) -> str:
        task, state = begin(group)
        snapshot = latest_checkpoint(tmp_path, pytest.fail, ranks_of(task.replicas))
        assert snapshot is not None
        state = restore(state, snapshot)
        task.replicas.remember(snapshot.step, snapshot.entries)
        return hash_tensors(take_steps(task, state, 3).model.parameters)  # past the meeting at step 8

    run_virtual(save, 2)
    assert run_virtual(go_on, 2).results == run_virtual(go_through, 2).results
