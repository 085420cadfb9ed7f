"""Linear layers split over ranks that are data parallel before them, against one rank; and faults that proofs find."""

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.proofs import prove_on_virtual_ranks, small_net
from weft.distributed.placement import weighting
from weft.distributed.placement.linear import layers, moves
from weft.distributed.placement.linear import placement as linear_placement
from weft.errors import PlanError, RecipeError
from weft.training.build import check_recipe
from weft.training.recipe import Recipe

LENET = {"model.channels1": 2, "model.channels2": 3, "model.hidden": 10}
VGG = {"model.channels": "3,4", "model.depth": 1, "model.hidden": 9}

RECIPES = {
    "perceptron": small_net("mlp", **{"model.hidden": "16,12,20"}),
    "lenet, dropout, clipped": small_net("lenet", **LENET, **{"model.dropout": 0.3, "clip_norm": 0.05}),
    "vgg, batch norm, accumulated": small_net("vgg", **VGG, **{"model.batch_norm": True, "accumulate": 3}),
    "vgg, adam, fewer samples than ranks in the last batch": small_net("vgg", **VGG, batch_size=359, optimizer="adam"),
}


@pytest.mark.parametrize("plan", ["linear=2", "linear=3", "data=2 linear=2"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_split_linear_layers_are_those_of_one_rank(recipe: Recipe, plan: str) -> None:
    proof = prove_on_virtual_ranks(recipe, plan)
    assert proof.passed, proof.finding


def test_in_float32_within_the_tolerance() -> None:
    recipe = small_net("lenet", **LENET, **{"model.dropout": 0.3})
    proof = prove_on_virtual_ranks(recipe, "linear=3", dtype=torch.float32)
    assert proof.passed, proof.finding


def test_more_ranks_than_outputs() -> None:
    """Of a layer with five outputs some of six ranks have none."""
    proof = prove_on_virtual_ranks(small_net("mlp", **{"model.hidden": "5,16"}), "linear=6")
    assert proof.passed, proof.finding


def test_samples_scattered_in_the_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = moves._MOVES["sum", "own"]

    def turned(tensor: Tensor, deal: moves.Deal) -> Tensor:
        return right(tensor.roll(1, dims=0), deal)

    monkeypatch.setitem(moves._MOVES, ("sum", "own"), turned)
    proof = prove_on_virtual_ranks(RECIPES["perceptron"], "linear=2")
    assert not proof.passed and "is off by" in proof.finding


def test_weights_applied_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before backward and in the exchange: with equal shares that is a smaller gradient for all layers."""
    once = weighting.scale_gradient
    monkeypatch.setattr(weighting, "scale_gradient", lambda values, weight: once(once(values, weight), weight))
    proof = prove_on_virtual_ranks(RECIPES["perceptron"], "linear=2")
    assert not proof.passed and "is off by" in proof.finding


def test_a_mask_of_another_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank draws for the samples of all, where each should for its own."""
    right = moves.move

    def drawn_by_all(tensor: Tensor, deal: moves.Deal, source: moves.Layout, target: moves.Layout) -> Tensor:
        moved = right(tensor, deal, source, target)
        return moved.flip(0) if tensor.dtype is torch.uint8 else moved

    monkeypatch.setattr(layers, "move", drawn_by_all)
    proof = prove_on_virtual_ranks(RECIPES["lenet, dropout, clipped"], "linear=2")
    assert not proof.passed


def test_a_norm_of_one_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    split = linear_placement.SplitLinearLayers
    monkeypatch.setattr(split, "norm", lambda self, norms: self._inner.norm(norms))
    proof = prove_on_virtual_ranks(RECIPES["lenet, dropout, clipped"], "linear=2")
    assert not proof.passed


def test_an_executor_that_captures_is_refused() -> None:
    with pytest.raises(PlanError, match="executor=eager"):
        prove_on_virtual_ranks(small_net("mlp", executor="graph"), "linear=2")


def test_an_optimizer_of_whole_tensors_is_refused() -> None:
    recipe = small_net("mlp", optimizer="torch", **{"optimizer.name": "Adafactor", "optimizer.lr": 0.1})
    with pytest.raises(RecipeError, match="needs whole tensors"):
        check_recipe(recipe.with_setting("plan", "linear=2"))
