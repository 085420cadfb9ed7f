"""PipeDream on virtual ranks: every stage follows the simulation to the last bit, drains, stops and saves together."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import run_weft
from tests.distributed.placement.test_data_parallel import interrupt_on
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import splits_of, with_settings
from tests.training.planted import ignore
from tests.training.test_run import tiny
from weft.distributed.group import AbstractGroup
from weft.distributed.placement.pipeline import pipedream_stash
from weft.distributed.realise import RunSpec
from weft.errors import PlanError, RecipeError
from weft.proving.method import Case, Evidence
from weft.proving.proof import Proof
from weft.proving.streamed import Streamed
from weft.recipes import digits_mlp, pydoc_gpt
from weft.records.run_folder import RunFolder, create_run_folder
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.build import build_splits, check_recipe
from weft.training.checkpoint import latest_checkpoint
from weft.training.events import Event, StepEnded, StopTraining
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.run import resume_run, run_recipe


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    """Held for all virtual ranks together: each of them switches it for the whole process."""
    with use_determinism():
        yield


def mlp(**settings: object) -> Recipe:
    base = {"model.hidden": "8,8,8", "batch_size": 66, "optimizer": "momentum", "optimizer.lr": 0.1}
    return with_settings(digits_mlp(), **{**base, "schedule": "constant", **settings})


def prove(recipe: Recipe, plan: str, num_steps: int = 20) -> Proof:
    chosen = recipe.with_setting("plan", plan)
    splits = splits_of(recipe.fixed.data) if recipe.name == "digits_mlp" else build_splits(recipe)
    case = Case(chosen, splits, 0, num_steps)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> dict[str, torch.Tensor]:
        return Streamed().trace(case, replicas)

    found = run_plan(plan, work, spec=RunSpec.of(chosen, (0,))).results
    return Streamed().judge(case, [Evidence(found, Path())])


RECIPES = {
    "momentum": mlp(),
    "adam, a schedule": with_settings(digits_mlp(), model__hidden="8,8,8", batch_size=64),
    "nesterov": mlp(optimizer="nesterov"),
    "clipped, dropout": mlp(clip_norm=0.1, model__dropout=0.3),
}


@pytest.mark.parametrize("sync", ["own", "vertical"])
@pytest.mark.parametrize("name", RECIPES)
def test_stages_follow_the_simulation_of_their_stashes(name: str, sync: str) -> None:
    proof = prove(RECIPES[name], f"pipeline=3 schedule=pipedream(sync={sync})")
    assert proof.passed and proof.is_bitwise, proof.finding
    assert "3 stages followed the simulation of their stashes for 20 steps" in proof.finding


@pytest.mark.parametrize("sync", ["own", "vertical"])
def test_replicas_of_stages_average_in_every_step(sync: str) -> None:
    proof = prove(mlp(), f"data=2 pipeline=2 schedule=pipedream(sync={sync})")
    assert proof.passed and proof.is_bitwise, proof.finding


def test_a_replica_without_samples_of_a_short_batch_keeps_step() -> None:
    """The last batch of an epoch has one sample: one replica has none of it, and its stages pass no value on."""
    proof = prove(mlp(batch_size=112), "data=2 pipeline=2 schedule=pipedream", num_steps=24)  # 1347 = 12 * 112 + 3
    assert proof.passed and proof.is_bitwise, proof.finding
    one_left = mlp(batch_size=673)  # 1347 = 2 * 673 + 1
    assert prove(one_left, "data=2 pipeline=2 schedule=pipedream", num_steps=6).passed


def stale_take(stash: Any, minibatch: int) -> Any:
    """A stash that was not renewed: the version before the newest."""
    found = take(stash, minibatch)
    before = getattr(stash, "before", found)
    stash.before = found
    return before


take = pipedream_stash.Stash.take


@pytest.mark.parametrize("sync", ["own", "vertical"])
def test_a_stale_stash_is_found(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipedream_stash.Stash, "take", stale_take)
    proof = prove(mlp(), f"pipeline=3 schedule=pipedream(sync={sync})")
    assert not proof.passed and "is off by" in proof.finding


def test_backward_with_the_newest_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stash at all: updates write to the weights that a minibatch under way came forward with."""

    def write_over(stash: Any, minibatch: int) -> Any:
        found = take(stash, minibatch)
        seen = stash.__dict__.setdefault("seen", [])
        with torch.no_grad():
            for old in seen:
                for name, weight in old.items():
                    weight.data.copy_(found[name].data)
        seen.append(found)
        return found

    monkeypatch.setattr(pipedream_stash.Stash, "take", write_over)
    assert not prove(mlp(), "pipeline=3 schedule=pipedream").passed


def test_plans_and_recipes_that_pipedream_cannot_carry_out_are_refused() -> None:
    for split in ("shard", "expert", "linear"):
        with pytest.raises(
            PlanError, match=rf"replicated on data alone .*nearest: .*{split}=2.* schedule=1f1b\(micro=8\)"
        ):
            parse_plan(f"{split}=2 pipeline=2 schedule=pipedream")
    with pytest.raises(PlanError, match=r"update a tied parameter in other steps \(tokens.weight: stages 0, 1\)"):
        gpt = with_settings(pydoc_gpt(), model__width=16, model__num_layers=2, batch_size=4)
        prove(gpt, "pipeline=2 schedule=pipedream", num_steps=2)
    with pytest.raises(RecipeError, match="a minibatch of PipeDream is one batch"):
        check_recipe(mlp(accumulate=2).with_setting("plan", "pipeline=2 schedule=pipedream"))


PLAN = "pipeline=3 schedule=pipedream"


def run_on(recipe: Recipe, path: Path, plan: str, listeners: tuple[Any, ...] = ()) -> list[Any]:
    folder = create_run_folder(path, recipe.name)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> Any:
        return run_recipe(recipe, folder=folder, seeds=(0,), listeners=listeners, replicas=replicas)

    return list(run_plan(plan, work, spec=RunSpec.of(recipe, (0,))).results)


def tiny_pipe(**settings: object) -> Recipe:
    return tiny(model__hidden="16,16,16", plan=PLAN, **settings)


def test_a_run_evaluates_drained_and_leaves_one_record(tmp_path: Path) -> None:
    records = run_on(tiny_pipe(), tmp_path / "run", PLAN)
    first = records[0].repetitions[0]
    assert (first.status, first.stop_reason) == ("done", "all samples used")
    assert len(first.series["train/loss"]) == 5
    assert first.series["train/loss"][2:] != first.series["train/loss"][:1] * 3


class StopAtStep:
    """On one rank alone, as a signal would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded) and event.progress.step == self._step:
            raise StopTraining("enough")


def test_a_wish_to_stop_is_granted_on_all_ranks_after_the_same_step(tmp_path: Path) -> None:
    records = run_on(tiny_pipe(epochs=2), tmp_path / "run", PLAN, listeners=(StopAtStep(4),))
    found = records[0].repetitions[0]
    assert found.stop_reason == "enough"
    assert len(found.series["train/loss"]) == 5  # one step later: the decision goes with the values of the next


def test_a_run_goes_on_from_a_checkpoint_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped where the other run is drained too, for its evaluation: after step 3."""
    recipe = tiny_pipe(epochs=1)
    whole = run_on(recipe, tmp_path / "whole", PLAN)[0].repetitions[0]
    with interrupt_on(monkeypatch, 0, 2), pytest.raises(KeyboardInterrupt):
        run_on(recipe, tmp_path / "cut", PLAN)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> Any:
        return resume_run(RunFolder(tmp_path / "cut"), replicas=replicas)

    resumed = run_plan(PLAN, work, spec=RunSpec.of(recipe, (0,))).results[0].repetitions[0]
    assert resumed.hashes == whole.hashes
    assert [e.values for e in resumed.evaluations] == [e.values for e in whole.evaluations]


def test_a_checkpoint_is_of_the_drained_model_and_loads_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_pipe(epochs=1)
    with interrupt_on(monkeypatch, 0, 2), pytest.raises(KeyboardInterrupt):
        run_on(recipe, tmp_path / "cut", PLAN)
    snapshot = latest_checkpoint(tmp_path / "cut/checkpoint/seed-0", ignore)
    assert snapshot is not None and snapshot.step == 3
    assert snapshot.entries["optimizer/step"].tensor.item() == 3  # every stage has made all updates
    assert resume_run(RunFolder(tmp_path / "cut")).repetitions[0].status == "done"


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["own", "vertical"])
def test_real_processes_are_proved(sync: str, capfd: pytest.CaptureFixture[str]) -> None:
    outcome = run_weft(capfd, "prove", "digits_mlp", "--plan", f"data=2 pipeline=2 schedule=pipedream(sync={sync})")
    assert outcome.code == 0, outcome.err
    assert "2 stages followed the simulation of their stashes for 20 steps, to the last bit" in outcome.out
