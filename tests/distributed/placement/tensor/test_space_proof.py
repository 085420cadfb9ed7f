"""Pictures cut by rows over ranks, against one rank; and faults that the comparison finds."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.distributed.placement.proofs import prove_on_virtual_ranks, small_net
from weft.distributed.placement.tensor import TensorParallel, space_layers, space_rows
from weft.errors import PlanError
from weft.training.recipe import Recipe

RULE = {"rules.*": "space"}
RECIPES = {
    "lenet, dropout": small_net("lenet", **RULE, **{"model.channels1": 2, "model.channels2": 3, "model.dropout": 0.3}),
    "residual, clipped": small_net("resnet", **RULE, **{"model.depth": 8, "model.width": 2, "clip_norm": 0.1}),
    "residual, convolved shortcuts": small_net(
        "resnet", **RULE, **{"model.depth": 8, "model.width": 2, "model.shortcut": "B"}
    ),
    "vgg, batch norm": small_net(
        "vgg", **RULE, **{"model.channels": "3,4", "model.hidden": 8, "model.batch_norm": True}
    ),
}


@pytest.mark.parametrize("plan", ["tensor=2", "tensor=3", "data=2 tensor=2"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rows_on_several_ranks_are_pictures_on_one(recipe: Recipe, plan: str) -> None:
    """8 rows on 3 ranks are uneven, and after two halvings one of them has none."""
    proof = prove_on_virtual_ranks(recipe, plan)
    assert proof.passed, proof.finding


def test_in_float32_within_the_tolerance() -> None:
    proof = prove_on_virtual_ranks(RECIPES["residual, clipped"], "tensor=3", dtype=torch.float32)
    assert proof.passed, proof.finding


@pytest.mark.parametrize("change", [{"above": 0}, {"kernel": 1, "above": 0, "below": 0}])
def test_a_halo_of_the_wrong_width_is_found(monkeypatch: pytest.MonkeyPatch, change: dict[str, int]) -> None:
    """Rows beyond the edge of a part are taken for padding: one side, or both."""
    right = space_rows.Window.needs

    def narrow(self: space_rows.Window, outputs: space_rows.Span) -> space_rows.Span:
        begin, end = right(self, outputs)
        first = right(replace(self, **change), outputs)[0]
        return first, first + end - begin

    monkeypatch.setattr(space_rows.Window, "needs", narrow)
    assert not prove_on_virtual_ranks(RECIPES["lenet, dropout"], "tensor=2").passed


def test_gradients_of_one_part_of_the_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorParallel, "reduced_over", lambda self, name: self._inner.reduced_over(name))
    assert not prove_on_virtual_ranks(RECIPES["lenet, dropout"], "tensor=2").passed


def test_statistics_of_one_part_of_the_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space_layers, "sum_over", lambda x, group: x)
    assert not prove_on_virtual_ranks(RECIPES["vgg, batch norm"], "tensor=2").passed


def test_halos_that_keep_their_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = space_rows._Fetch.backward

    def own_alone(ctx: object, gradient: torch.Tensor) -> object:
        total, *rest = right(ctx, gradient)
        kept = total.clone()
        kept[..., 0, :] = 0
        return kept, *rest

    monkeypatch.setattr(space_rows._Fetch, "backward", staticmethod(own_alone))
    assert not prove_on_virtual_ranks(RECIPES["lenet, dropout"], "tensor=2").passed


@pytest.mark.parametrize(("name", "why"), [("7", "7: Linear"), ("conv.*", r"conv\.\*: space")])
def test_layers_that_cannot_take_rows_are_refused(name: str, why: str) -> None:
    recipe = small_net("lenet", **{f"rules.{name}": "space"})
    with pytest.raises(PlanError, match=why):
        prove_on_virtual_ranks(recipe, "tensor=2")


def test_every_kind_of_window_is_supported_or_left_whole() -> None:
    taken = [nn.Conv2d(1, 1, 3, padding="same"), nn.MaxPool2d(2), nn.AvgPool2d(3, padding=1), nn.BatchNorm2d(2)]
    whole = [nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(2, ceil_mode=True), nn.Linear(2, 2)]
    assert all(map(space_layers.is_supported, taken))
    assert not any(map(space_layers.is_supported, whole))
