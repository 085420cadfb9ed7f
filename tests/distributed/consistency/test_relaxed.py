"""Relaxed replicas in whole runs: records, stops, checkpoints, other numbers of ranks and other plans."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.cases import make_replicas
from tests.distributed.consistency.pairs.paired import run_pairs
from tests.distributed.consistency.server.served import Course, momentum, spec_of
from tests.distributed.placement.test_data_parallel import interrupt_on, stop_after
from tests.training.planted import build_tiny, clock_of_ticks, ignore, module_with_dropout
from tests.training.test_run import tiny
from weft.distributed.consistency.agreement import Agreement
from weft.distributed.consistency.pairs import GossipReplicas
from weft.distributed.consistency.server import ServedReplicas, serve, settings_of
from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import VirtualMailbox
from weft.distributed.virtual import run_virtual
from weft.errors import DivergedError
from weft.records.record import Repetition, RunRecord
from weft.records.record_file import read_record
from weft.records.run_folder import RunFolder, create_run_folder
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training import run as run_module
from weft.training.checkpoint.index import read_index
from weft.training.checkpoint.reading import ChunkReader, checkpoints_in
from weft.training.events import Listener
from weft.training.loop import Task, TrainingState, train
from weft.training.recipe import Recipe
from weft.training.run import resume_run, run_recipe

SCHEMES = ["local(2,outer=nesterov)", "gossip(ring)", "elastic(2)"]


@pytest.fixture(autouse=True)
def quick_and_determinate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Determinism for all virtual ranks together, and nothing that a run measures of itself in the end."""
    for probe in ("probe_scaling", "probe_step", "probe_data"):
        monkeypatch.setattr(run_module, probe, lambda *_: {})
    with use_determinism():
        yield


def run_on(
    size: int, recipe: Recipe, path: Path, consistency: str, listeners: Sequence[Listener] = ()
) -> list[RunRecord]:
    folder = create_run_folder(path, recipe.name)

    def program(group: AbstractGroup) -> RunRecord:
        replicas = make_replicas(consistency)(group)
        return run_recipe(recipe, folder=folder, seeds=(0,), listeners=listeners, replicas=replicas)

    return list(run_virtual(program, size).results)


def resume_on(size: int, path: Path, consistency: str) -> Repetition:
    def program(group: AbstractGroup) -> RunRecord:
        return resume_run(RunFolder(path), replicas=make_replicas(consistency)(group))

    record: RunRecord = run_virtual(program, size).results[0]
    return record.repetitions[0]


def recipe_of_steps(**settings: object) -> Recipe:
    """A run with dropout, through the end of an epoch."""
    return tiny(**{"model.dropout": 0.3, "epochs": 1.1, "optimizer": "momentum", "optimizer.lr": 0.05, **settings})


@pytest.mark.parametrize("consistency", SCHEMES)
def test_a_run_has_one_record_of_what_all_ranks_stand_for(tmp_path: Path, consistency: str) -> None:
    records = run_on(3, recipe_of_steps(), tmp_path / "run", consistency)
    assert read_record(tmp_path / "run") == records[0]
    repetitions = [record.repetitions[0] for record in records]
    assert len({repetition.hashes["parameters"] for repetition in repetitions}) == 1
    assert [r.evaluations[-1].values for r in repetitions] == [repetitions[0].evaluations[-1].values] * 3
    values = repetitions[0].values
    assert math.isfinite(values["test/accuracy"]) and values["bytes_per_step"] > 0
    assert values["consensus_distance"] == repetitions[0].evaluations[-1].values["consensus_distance"] >= 0


@pytest.mark.parametrize("consistency", [*SCHEMES, "local(2,state=mean)", "local(2,after=3)"])
def test_a_run_that_is_cut_goes_on_to_the_same_bits(
    tmp_path: Path, consistency: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Evaluated at the end alone: an evaluation averages running statistics, of which this model has none.
    recipe = recipe_of_steps(batch_size=64, evaluate_every=1.0)
    whole = run_on(3, recipe, tmp_path / "whole", consistency)[0].repetitions[0]
    with interrupt_on(monkeypatch, 1, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe, tmp_path / "cut", consistency)
    again = resume_on(3, tmp_path / "cut", consistency)
    assert again.status == "done" and again.hashes == whole.hashes
    assert again.series["train/loss"] == whole.series["train/loss"]


def checkpoint_of(path: Path) -> dict[str, str]:
    """The kind of every entry of the last checkpoint."""
    last = checkpoints_in(path / "checkpoint" / "seed-0")[-1]
    return {name: row.kind for name, row in read_index(last).rows.items()}


def test_checkpoints_hold_the_weights_of_every_rank_and_what_the_scheme_remembers(tmp_path: Path) -> None:
    for consistency in ("local(2,outer=nesterov)", "elastic(2)"):
        run_on(2, recipe_of_steps(), tmp_path / consistency[:5], consistency)
    local, elastic = checkpoint_of(tmp_path / "local"), checkpoint_of(tmp_path / "elast")
    assert {local[name] for name in local if name.startswith(("parameter/", "slot/"))} == {"mean"}
    assert {k.split("/")[1]: v for k, v in local.items() if k.startswith("local/")} == {
        "round": "own",
        "anchor": "global",
        "velocity": "global",
    }
    assert {v for k, v in elastic.items() if k.startswith("elastic/centre/")} == {"global"}


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        ("local(2)", "local(2)", 2),
        ("local(2,outer=nesterov)", "local(3)", 4),
        ("elastic(2)", "elastic(2)", 4),
        ("gossip(ring)", "sync", 3),
        ("sync", "local(2,outer=nesterov)", 3),
        ("sync", "elastic(2)", 2),
        ("elastic(2)", "gossip(ring)", 2),
    ],
)
def test_another_number_of_ranks_or_another_consistency_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, size: int
) -> None:
    recipe = recipe_of_steps(batch_size=64)
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe, tmp_path / "run", before)
    again = resume_on(size, tmp_path / "run", after)
    assert again.status == "done" and len(again.series["train/loss"]) == len(again.series["step_time"]) == 22
    assert again.series["train/loss"][-1] < again.series["train/loss"][0]


def begin_again(
    monkeypatch: pytest.MonkeyPatch, path: Path, resume: Callable[[], object]
) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """What every rank has before the first step of a resumed run, and the mean of what was saved."""
    last = checkpoints_in(path / "checkpoint" / "seed-0")[-1]
    rows = {n: row for n, row in read_index(last).rows.items() if n.startswith(("parameter/", "slot/"))}
    with ChunkReader(last, read_index(last)) as reader:
        trained = {n: [reader.read(n, i) for i in range(len(row.tensors))] for n, row in rows.items()}
    assert any(not torch.equal(parts[0], other) for parts in trained.values() for other in parts[1:])
    found: dict[int, dict[str, Tensor]] = {}

    def look(task: Task, state: TrainingState, **_: object) -> tuple[TrainingState, str]:
        slots = task.replicas.collect(state.optimizer).slots
        own = {f"parameter/{name}": tensor for name, tensor in state.model.parameters.items()}
        own |= {f"slot/{name}/{slot}": tensor for name, kept in slots.items() for slot, tensor in kept.items()}
        found[task.replicas.mesh.rank] = {name: tensor.detach().clone() for name, tensor in own.items()}
        return state, "looked at"

    monkeypatch.setattr(run_module, "train", look)
    resume()
    return found, {name: torch.stack(parts).mean(0) for name, parts in trained.items()}


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.allclose(found[name], expected[name], rtol=tolerance, atol=tolerance) for name in found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gossip(ring)", "sync"),
        ("local(2)", "sync"),  # at a meeting the weights are the same, the slots are not
        ("local(2)", "local(3)"),
        ("elastic(2)", "gossip(ring)"),
        ("gossip(ring)", "local(2,outer=nesterov)"),
    ],
)
def test_with_another_consistency_all_ranks_begin_with_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str
) -> None:
    # Regression: as many ranks took each its own weights, whatever came after, and synchronous ones stayed apart.
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe_of_steps(batch_size=64), tmp_path / "run", before)
    found, mean = begin_again(monkeypatch, tmp_path / "run", lambda: resume_on(3, tmp_path / "run", after))
    assert same(found[1], found[0]) and same(found[2], found[0])
    assert same(found[0], mean, 1e-6)


def test_with_the_same_consistency_ranks_begin_with_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe_of_steps(batch_size=64), tmp_path / "run", "gossip(ring)")
    found, mean = begin_again(monkeypatch, tmp_path / "run", lambda: resume_on(3, tmp_path / "run", "gossip(ring)"))
    assert not same(found[0], found[1]) and not same(found[0], mean, 1e-6)


def test_servers_begin_with_the_mean_of_ranks_that_were_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Regression: they took the weights and slots of rank 0.
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe_of_steps(batch_size=64), tmp_path / "run", "gossip(ring)")
    plan = parse_plan("data=3 consistency=stale(0) topology=server")

    def program(group: AbstractGroup) -> None:
        mailbox = VirtualMailbox(group)
        if group.rank == 3:
            serve(mailbox, spec_of(Course(plan), 0))
            return
        replicas = ServedReplicas(mailbox, settings_of(plan, momentum()), [0])
        resume_run(RunFolder(tmp_path / "run"), replicas=replicas)

    found, mean = begin_again(monkeypatch, tmp_path / "run", lambda: run_virtual(program, 4, timeout=1e6))
    assert same(found[0], mean, 1e-6)  # the slots are those of the servers
    weights = [name for name in mean if name.startswith("parameter/")]
    assert all(torch.equal(found[rank][name], found[0][name]) for rank in (1, 2) for name in weights)


def test_pairs_begin_with_the_mean_of_ranks_that_were_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Regression: the weights were rank 0's, and slots each rank's own.
    with interrupt_on(monkeypatch, 0, 3), pytest.raises(KeyboardInterrupt):
        run_on(3, recipe_of_steps(batch_size=64), tmp_path / "run", "gossip(ring)")
    plan = parse_plan("data=3 consistency=gossip(complete,mix=pair)")

    def work(_: AbstractGroup, replicas: GossipReplicas) -> RunRecord:
        return resume_run(RunFolder(tmp_path / "run"), replicas=replicas)

    found, mean = begin_again(monkeypatch, tmp_path / "run", lambda: run_pairs(plan, work))
    assert all(same(found[rank], mean, 1e-6) for rank in range(3))


@pytest.mark.parametrize(("consistency", "expected"), [("local(3)", 6), ("local(3,after=5)", 4), ("gossip(ring)", 16)])
def test_all_ranks_stop_after_the_same_step(consistency: str, expected: int) -> None:
    """A wish at step 4 is heard at the next meeting; where ranks never meet, when the vote at step 8 is counted."""

    def program(group: AbstractGroup) -> tuple[int, str]:
        task, state = build_tiny(module_with_dropout, replicas=make_replicas(consistency)(group), epochs=20.0)
        task.replicas.join(state.model)
        listener = stop_after(4) if group.rank == 1 else ignore
        final, reason = train(task, state, emit=listener, save=ignore, clock=clock_of_ticks())
        return final.step, reason

    results = run_virtual(program, 2).results
    assert results == ((expected, "another rank wished to stop"), (expected, "enough"))


def test_votes_are_cast_on_the_way_and_counted_one_period_later() -> None:
    def program(group: AbstractGroup) -> list[tuple[bool, bool]]:
        agreement, answers = Agreement(group, period=2), []
        for step in range(1, 9):
            first = agreement.ask("stop", step, group.rank == 1 and step in (2, 3, 4))
            answers.append((first, agreement.ask("save", step, group.rank == 0 and step >= 5)))
        agreement.settle()
        return answers

    answers = run_virtual(program, 3).results
    assert answers[0] == answers[1] == answers[2]
    assert [step for step, (first, _) in enumerate(answers[0], 1) if first] == [4]
    assert [step for step, (_, second) in enumerate(answers[0], 1) if second] == [8]


def test_a_rank_that_is_less_than_a_period_behind_holds_nobody_up() -> None:
    def program(group: AbstractGroup) -> float:
        agreement = Agreement(group, period=4)
        for step in range(1, 8):
            group.clock.charge(10.0 if group.rank == 1 else 1.0)
            agreement.ask("stop", step, False)
        moment = group.clock.now()
        agreement.settle()
        return moment

    assert run_virtual(program, 2).results == (7.0, 70.0)


def test_a_checkpoint_that_was_due_between_meetings_is_written_at_the_next(tmp_path: Path) -> None:
    run_on(2, recipe_of_steps(checkpoint_steps=4, batch_size=128), tmp_path / "run", "local(3)")
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoint" / "seed-0").iterdir())
    assert steps == [9, 11]  # due at 4 and 8, written at 6 and 9; the last step is always written


def test_a_rank_that_diverges_says_so_and_names_its_step(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="loss is not finite"):
        run_on(2, recipe_of_steps(**{"optimizer.lr": 1e30}), tmp_path / "run", "local(4)")


def test_the_own_weights_are_back_after_an_evaluation() -> None:
    def program(group: AbstractGroup) -> bool:
        task, state = build_tiny(module_with_dropout, replicas=make_replicas("gossip(ring)")(group))
        task.replicas.join(state.model)
        with torch.no_grad():
            for parameter in state.model.parameters.values():
                parameter.add_(group.rank)
        own = {name: tensor.detach().clone() for name, tensor in state.model.parameters.items()}
        task.replicas.remember(3, {})
        with task.replicas.use_consensus(state.model):
            moved = all(torch.allclose(p, own[n] - group.rank + 1) for n, p in state.model.parameters.items())
        return moved and all(torch.equal(p, own[n]) for n, p in state.model.parameters.items())

    assert run_virtual(program, 3).results == (True,) * 3
