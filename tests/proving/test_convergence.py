"""The convergence gate over whole trainings: sound schemes pass, planted faults do not."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from tests.distributed.consistency.cases import small_mlp
from tests.proving.test_lockstep import splits_of
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.engines.rank_program import RankProgram
from weft.errors import RankFailedError, UsageError
from weft.metrics.convergence import Convergence
from weft.proving import convergence as module
from weft.proving.convergence import check_convergence, check_target, count_samples
from weft.training.recipe import Recipe
from weft.training.replicas import SoloReplicas


def recipe_of(plan: str = "data=1", **settings: object) -> Recipe:
    """A few epochs to a target that is easily reached; every evaluation is a quarter of an epoch."""
    usual = {"target": "accuracy:0.7", "epochs": 6, "evaluate_every": 0.25, "plan": plan, "model.hidden": 32}
    return small_mlp(**{**usual, **settings})


@pytest.fixture
def virtual_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank program of the gate, on virtual ranks."""

    def run_ranks(program: RankProgram, num_ranks: int) -> list[Any]:
        chosen = Recipe.from_dict(program.arguments["recipe"])

        def be_rank(group: AbstractGroup) -> Sequence[float | None]:
            replicas = replicas_in(MeshGroups(group, chosen.mutable.plan.mesh(group.rank)), chosen.mutable.plan)
            found = count_samples(chosen, splits_of(chosen.fixed.data), program.arguments["seeds"], replicas)
            return [value if math.isfinite(value) else None for value in found]

        return list(run_virtual(be_rank, num_ranks, timeout=1e6).results)

    monkeypatch.setattr(module, "run_ranks", run_ranks)


def gate(consistency: str, *, num_ranks: int = 2, num_seeds: int = 5, **settings: object) -> Convergence:
    recipe = recipe_of(f"data={num_ranks} consistency={consistency}", **settings)
    return check_convergence(recipe, seeds=range(num_seeds), margin=1.0)


@pytest.mark.usefixtures("virtual_ranks")
@pytest.mark.parametrize("consistency", ["local(4)", "gossip(ring)", "elastic(2)"])
def test_sound_schemes_converge(consistency: str) -> None:
    verdict = gate(consistency)
    assert verdict.passed, verdict.finding
    assert all(math.isfinite(value) for value in (*verdict.samples, *verdict.reference))


@pytest.mark.long
@pytest.mark.usefixtures("virtual_ranks")
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("consistency", ["local(2)", "local(8)", "gossip(ring)", "gossip(complete)", "elastic(4)"])
def test_sound_schemes_converge_over_many_seeds(consistency: str, num_ranks: int) -> None:
    verdict = gate(consistency, num_ranks=num_ranks, num_seeds=30)
    assert verdict.passed, verdict.finding


@pytest.mark.usefixtures("virtual_ranks")
def test_a_wrong_averaging_weight_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Parcel.pack

    def shrink(self: Parcel, tensors: Mapping[str, Tensor], factor: float = 1.0) -> None:
        sound(self, tensors, 0.5 * factor)

    monkeypatch.setattr(Parcel, "pack", shrink)
    verdict = gate("local(4)", epochs=3)
    assert not verdict.passed and verdict.samples == (math.inf,) * 5


def test_ranks_that_diverge_are_a_verdict_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    code = 3

    def run_ranks(program: RankProgram, num_ranks: int) -> list[Any]:
        raise RankFailedError("rank 1 of 2: loss is not finite", 1, "", code)

    monkeypatch.setattr(module, "run_ranks", run_ranks)
    verdict = gate("local(4)", epochs=1, target="accuracy:0.1")
    assert not verdict.passed and verdict.finding.endswith("rank 1 of 2: loss is not finite")
    code = 2
    with pytest.raises(RankFailedError):
        gate("local(4)", epochs=1, target="accuracy:0.1")


def test_one_rank_that_diverges_has_not_arrived() -> None:
    recipe = recipe_of("data=1", **{"optimizer.lr": 1e30})
    assert count_samples(recipe, splits_of(recipe.fixed.data), [0, 1], SoloReplicas()) == [math.inf, math.inf]


def test_what_cannot_be_judged_is_refused_before_anything_is_trained() -> None:
    recipe = recipe_of("data=2 consistency=local")
    check_target(recipe, 5)
    with pytest.raises(UsageError, match="too few seeds"):
        check_target(recipe, 4)
    with pytest.raises(UsageError, match=r"--set target=accuracy:0\.95"):
        check_target(replace(recipe, fixed=replace(recipe.fixed, target=None)), 5)
