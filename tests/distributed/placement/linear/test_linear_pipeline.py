"""Linear layers split on some stages of a pipeline: with every schedule and product the training of one rank."""

import pytest

from tests.distributed.placement.expert.cases import small_moe
from tests.distributed.placement.linear.test_linear_proof import RECIPES, VGG
from tests.distributed.placement.proofs import prove_on_virtual_ranks, small_net
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import splits_of
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import weighting
from weft.distributed.placement.linear import placement as linear_placement
from weft.distributed.realise import RunSpec
from weft.errors import PlanError
from weft.specs import parse_plan
from weft.training.build import build_task
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

PLAN = "pipeline=2 linear=2 schedule=1f1b(4)"
SCHEDULES = ("gpipe(2)", "1f1b(4)", "zero_bubble(4)", "interleaved(4,chunks=2)")


def split_names(recipe: Recipe, plan: str) -> list[list[str]]:
    """The layers of which each rank has a part."""
    chosen = recipe.with_setting("plan", plan)

    def work(_group: AbstractGroup, replicas: AbstractReplicas) -> list[str]:
        task, _ = build_task(chosen, splits_of(recipe.fixed.data), 0, replicas)
        names = task.executor.initial_state().parameters
        cut = [name for name in names if replicas.placement.cut_of(f"parameter/{name}") is not None]
        return sorted({name.rpartition(".")[0] for name in cut})

    return list(run_plan(parse_plan(plan), work, spec=RunSpec.of(chosen, (0,))).results)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_stages_that_split_their_linear_layers_are_those_of_one_rank(recipe: Recipe, schedule: str) -> None:
    proof = prove_on_virtual_ranks(recipe, f"pipeline=2 linear=2 schedule={schedule}")
    assert proof.passed, proof.finding


@pytest.mark.parametrize(
    "others",
    ["", "data=2", "shard=2", "shard=2 shard_level=2", "shard=2 shard_level=3", "tensor=2", "tensor=1:2", "tensor=2:1"],
)
def test_twenty_steps_of_every_product(others: str) -> None:
    """Dropout, clipping, shares and micro-batches of different sizes."""
    proof = prove_on_virtual_ranks(RECIPES["lenet, dropout, clipped"], f"{others} {PLAN}", num_steps=20)
    assert proof.passed, proof.finding


def test_with_experts() -> None:
    recipe = small_moe(model__num_layers=2, **{"rules.blocks.*.attention.qkv": "split"})
    proof = prove_on_virtual_ranks(recipe, "pipeline=2 linear=2 expert=2 schedule=1f1b(2)")
    assert proof.passed, proof.finding


def test_replicas_without_samples_take_every_pass() -> None:
    """Batch norm too, of which a stage without samples keeps the statistics."""
    recipe = small_net("vgg", **VGG, **{"model.batch_norm": True, "batch_size": 359})
    proof = prove_on_virtual_ranks(recipe, PLAN, num_steps=5)
    assert proof.passed, proof.finding


def test_the_tail_is_split_and_the_end_of_another_stage_is_not() -> None:
    vgg = small_net("vgg", **VGG)
    first, *others = split_names(vgg, PLAN)
    assert not any("feature" in name or name.startswith("0") for names in others for name in names)
    assert first == others[0] and others[1] == others[2] != []
    whole = split_names(vgg, "linear=2")[0]
    assert sorted({*first, *others[1]}) == whole, "all of the tail, wherever it lies"


def test_rules_name_layers_of_any_stage() -> None:
    mlp = small_net("mlp", **{"model.hidden": "16,12,20"})
    layers = split_names(mlp, "linear=2")[0]
    ruled = mlp.with_setting("rules.*", "data").with_setting(f"rules.{layers[0]}", "split")
    found = split_names(ruled, PLAN)
    assert found[0] == found[1] == [layers[0]] and found[2] == found[3] == []
    proof = prove_on_virtual_ranks(ruled, PLAN)
    assert proof.passed, proof.finding


def test_a_chain_goes_on_from_stage_to_stage_and_chunk_to_chunk() -> None:
    """Samples of several micro-batches are under way between the parts of a chain."""
    mlp = small_net("mlp", **{"model.hidden": ",".join(["12"] * 7)})
    plan = "pipeline=2 linear=2 schedule=interleaved(4,chunks=2)"
    assert all(len(names) > 2 for names in split_names(mlp, plan))
    proof = prove_on_virtual_ranks(mlp, plan)
    assert proof.passed, proof.finding


def test_weights_that_are_not_of_micro_batches_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica's weight for its outputs, applied twice: parts and whole layers get smaller gradients."""
    once = weighting.scale_gradient
    monkeypatch.setattr(weighting, "scale_gradient", lambda values, weight: once(once(values, weight), weight))
    assert not prove_on_virtual_ranks(RECIPES["perceptron"], PLAN).passed


def test_a_gradient_of_a_part_that_is_added_up_along_the_axis_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    split = linear_placement.SplitLinearLayers
    monkeypatch.setattr(split, "reduced_over", lambda self, name: self._inner.reduced_over(name))
    assert not prove_on_virtual_ranks(RECIPES["perceptron"], PLAN).passed


def test_an_executor_that_captures_is_refused() -> None:
    with pytest.raises(PlanError, match="executor=eager"):
        prove_on_virtual_ranks(small_net("mlp", executor="graph"), PLAN)
