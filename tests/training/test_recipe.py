"""Recipes as values: round trips, the hash of the fixed part, settings, and every wrong one."""

import dataclasses
import json
from typing import Any

import pytest

from weft.errors import PlanError, RecipeError
from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

RECIPE = Recipe(
    name="small",
    description="a small one",
    fixed=Fixed(
        model=Component("mlp", hidden=(8, 4)),
        data=Component("digits"),
        loss=Component("cross_entropy"),
        epochs=2,
        metrics=("accuracy",),
        target=Rule("accuracy", 0.9),
    ),
    mutable=Mutable(batch_size=32, optimizer=Component("adam", lr=0.001), clip_norm=1.0),
    rules=(Rule("test/accuracy", 0.97), Rule("test/loss", 0.1)),
)


def test_recipe_through_json() -> None:
    again = Recipe.from_dict(json.loads(json.dumps(RECIPE.to_dict())))
    assert again == RECIPE and hash(again) == hash(RECIPE) and again.fixed_hash == RECIPE.fixed_hash


def test_recipe_without_options_through_json() -> None:
    fixed = dataclasses.replace(RECIPE.fixed, target=None, metrics=())
    bare = Recipe("bare", "", fixed, Mutable(batch_size=1, optimizer=Component("sgd", lr=1), checkpoint_seconds=None))
    assert Recipe.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


MUTABLE = [
    ("batch_size", "64"),
    ("optimizer", "sgd"),
    ("optimizer.lr", "0.5"),
    ("schedule", "cosine"),
    ("schedule.warmup_epochs", "1"),
    ("sampler", "ordered"),
    ("executor", "reference"),
    ("plan", "data=2"),
    ("device", "cpu"),
    ("buffers", "rank"),
    ("rules.classifier.*", "split"),
    ("init", "weights.safetensors"),
    ("accumulate", "2"),
    ("clip_norm", "none"),
    ("checkpoint_steps", "10"),
    ("checkpoint_seconds", "5"),
]
FIXED = [
    ("model", "cnn"),
    ("model.hidden", "16,8"),
    ("data", "pydoc"),
    ("data.path", "x.txt"),
    ("loss", "mse"),
    ("epochs", "3"),
    ("metrics", "accuracy,top5_accuracy"),
    ("target", "0.95"),
    ("target", "none"),
    ("target", "loss:0.5"),
    ("evaluate_every", "0.5"),
]


@pytest.mark.parametrize(("key", "text"), MUTABLE)
def test_mutable_setting_leaves_the_fixed_hash(key: str, text: str) -> None:
    changed = RECIPE.with_setting(key, text)
    assert changed != RECIPE and changed.fixed == RECIPE.fixed and changed.fixed_hash == RECIPE.fixed_hash


@pytest.mark.parametrize(("key", "text"), FIXED)
def test_fixed_setting_changes_the_fixed_hash(key: str, text: str) -> None:
    changed = RECIPE.with_setting(key, text)
    assert changed.mutable == RECIPE.mutable and changed.fixed_hash != RECIPE.fixed_hash


def test_rules_are_added_before_the_others_and_go_through_json() -> None:
    ruled = RECIPE.with_setting("rules.*", "data").with_setting("rules.fc", "split").with_setting("rules.*", "space")
    assert ruled.mutable.rules == (("*", "space"), ("fc", "split"))
    assert Recipe.from_dict(json.loads(json.dumps(ruled.to_dict()))) == ruled
    assert Mutable(1, Component("sgd"), rules={"fc": "split"}).rules == (("fc", "split"),)  # type: ignore[arg-type]
    assert ruled.with_setting("rules", "none") == RECIPE
    with pytest.raises(RecipeError, match="a rule is for layers with a name"):
        RECIPE.with_setting("rules", "split")


def test_every_field_has_been_set() -> None:
    names = {field.name for part in (Fixed, Mutable) for field in dataclasses.fields(part)}
    assert {key.partition(".")[0] for key, _ in (*MUTABLE, *FIXED)} == names


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("batch_size", "64", 64),
        ("epochs", "3", 3.0),
        ("clip_norm", "none", None),
        ("clip_norm", "2", 2.0),
        ("metrics", "accuracy", ("accuracy",)),
        ("metrics", "accuracy,top5_accuracy", ("accuracy", "top5_accuracy")),
        ("metrics", "()", ()),
        ("target", "0.5", Rule("accuracy", 0.5)),
        ("target", "loss:0.5", Rule("loss", 0.5)),
        ("target", "None", None),
        ("model", "cnn", Component("cnn")),  # the options of the old one go with it
        ("model.hidden", "16", Component("mlp", hidden=16)),
        ("data.path", "x.txt", Component("digits", path="x.txt")),
        ("model", "models.py:net", Component("models.py:net")),
    ],
)
def test_value_of_a_setting(key: str, text: str, value: Any) -> None:
    changed, name = RECIPE.with_setting(key, text), key.partition(".")[0]
    found = getattr(changed.fixed if hasattr(changed.fixed, name) else changed.mutable, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("batch_sise", "64", r"unknown key \(batch_sise\); did you mean 'batch_size'\?"),
        ("optimiser.lr", "1", r"unknown key \(optimiser.lr\); did you mean 'optimizer'\?"),
        ("zzz", "x", r"unknown key \(zzz\); known: accumulate, "),
        ("name", "x", r"unknown key \(name\)"),
        ("batch_size.lr", "1", r"key has no options \(batch_size.lr\); --set batch_size=1"),
        ("target.bound", "1", "key has no options"),
        ("batch_size", "many", r"wrong type \(batch_size: 'many', wanted: int\)"),
        ("batch_size", "1.5", "wrong type"),
        ("batch_size", "none", "wrong type"),
        ("epochs", "true", "wrong type"),
        ("clip_norm", "big", "wrong type"),
        ("clip_norm", "1e999", "cannot be written as JSON"),
        ("metrics", "1", "wrong type"),
        ("target", "high", "wrong type"),
        ("target", "acuracy:0.9", r"unknown metric \(acuracy\); did you mean 'accuracy'"),
        ("model.hidden", "{1: 2}", "cannot be written as JSON"),
    ],
)
def test_wrong_setting(key: str, text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        RECIPE.with_setting(key, text)


def test_a_wrong_plan_is_refused_as_plans_are() -> None:
    with pytest.raises(PlanError, match=r"unknown word in a plan \(1\)"):
        RECIPE.with_setting("plan", "1")


def test_bound_without_a_metric() -> None:
    with pytest.raises(RecipeError, match=r"no target .*--set target=METRIC:BOUND"):
        RECIPE.with_setting("target", "none").with_setting("target", "0.5")


def test_equal_recipes_have_equal_hashes() -> None:
    # A whole number is the same as text of a setting and as Python; a hash over its spelling would tell them apart.
    again = RECIPE.with_setting("epochs", "2").with_setting("model.hidden", "8.0,4")
    assert again == RECIPE and again.fixed_hash == RECIPE.fixed_hash


def test_fixed_hash_stays_the_same_for_ever() -> None:
    # A record of last year is compared with one of today by this value.
    assert RECIPE.fixed_hash == "2ebbf92648c649ee2b4b158a08226e240e6c9cb20d96ef399201eb39bc920ba0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": "32"}, r"wrong type \(batch_size: '32', wanted: int\)"),
        ({"optimizer": "adam"}, r"wrong type \(optimizer: 'adam', wanted: Component\)"),
        ({"clip_norm": "1"}, "wrong type"),
    ],
    ids=str,
)
def test_recipe_written_in_python_with_a_wrong_type(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        dataclasses.replace(RECIPE.mutable, **change)


def test_recipe_data_with_an_unknown_key() -> None:
    data = RECIPE.to_dict()
    data["mutable"]["batchsize"] = 3
    with pytest.raises(RecipeError, match=r"unknown key \(batchsize\); did you mean 'batch_size'"):
        Recipe.from_dict(data)


@pytest.mark.parametrize("part", ["name", "description", "fixed", "mutable", "rules"])
def test_recipe_data_that_is_not_whole(part: str) -> None:
    data = RECIPE.to_dict()
    with pytest.raises(RecipeError, match="recipe is not whole"):
        Recipe.from_dict({key: value for key, value in data.items() if key != part})
    with pytest.raises(RecipeError):
        Recipe.from_dict({**data, "fixed": {**data["fixed"], "model": 3}, "mutable": {}})
