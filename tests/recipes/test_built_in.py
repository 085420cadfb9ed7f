"""Every built-in recipe: it can be built, it says what it must reach, and the same seed gives the same bits."""

from pathlib import Path

import pytest

from weft.errors import DataNotFoundError, RecipeError
from weft.recipes import BUILT_IN, find_recipe
from weft.records.run_folder import create_run_folder
from weft.training.build import check_recipe
from weft.training.datasets import locate
from weft.training.recipe import Recipe
from weft.training.run import run_recipe

# Enough steps to go through every part of the recipe, few enough for a test.
SHORT = {
    "digits_mlp": {"epochs": "0.2"},
    "digits_cnn": {"epochs": "0.2"},
    "fashion_cnn": {"epochs": "0.3", "data.limit": "640", "evaluate_every": "9"},
    "fashion_vgg": {"epochs": "0.3", "data.limit": "320", "model.channels": "4,8", "model.hidden": "32"},
    "pydoc_lstm": {"epochs": "0.02"},
    "pydoc_gpt": {"epochs": "0.02"},
    "pydoc_moe": {"epochs": "0.02"},
    "heat_regression": {"epochs": "0.1"},
}


def shortened(name: str) -> Recipe:
    recipe = find_recipe(name).with_setting("schedule", "constant")
    for key, value in SHORT[name].items():
        recipe = recipe.with_setting(key, value)
    return recipe


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_is_whole(name: str) -> None:
    recipe = find_recipe(name)
    check_recipe(recipe)
    assert recipe.name == name
    assert recipe.rules, "a recipe states what it must reach"
    assert len(recipe.description) < 90
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert hash(recipe) == hash(find_recipe(name))


@pytest.mark.parametrize("name", SHORT)
def test_same_seed_same_bits(name: str, tmp_path: Path) -> None:
    if not locate(dict(BUILT_IN)[name]().fixed.data.name).found:
        pytest.skip("its data is not on this machine")
    one, two = (
        run_recipe(shortened(name), folder=create_run_folder(tmp_path / run, name), seeds=(5,)).repetitions[0]
        for run in "ab"
    )
    assert one.hashes == two.hashes
    assert one.series["train/loss"] == two.series["train/loss"]
    assert len(one.series["train/loss"]) >= 2
    assert one.evaluations[-1].values == two.evaluations[-1].values


def test_recipes_whose_data_is_missing_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataNotFoundError, match="cifar10"):
        run_recipe(find_recipe("cifar10_resnet20"), folder=create_run_folder(tmp_path / "run", "x"), seeds=(0,))


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'digits_mlp'"):
        find_recipe("digit_mlp")


def test_a_function_that_returns_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def recipe():\n    return 3\n")
    with pytest.raises(RecipeError, match="does not return a recipe"):
        find_recipe(f"{file}:recipe")


def test_a_recipe_of_ones_own_trains(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "import weft\n"
        "def net(task, *, width: int = 8):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, task.num_outputs))\n"
        "def recipe():\n"
        "    fixed = weft.Fixed(model=weft.Component(__file__ + ':net', width=16), data=weft.Component('digits'),\n"
        "                       loss=weft.Component('cross_entropy'), epochs=0.2)\n"
        "    return weft.Recipe('mine', 'my own', fixed, weft.Mutable(64, weft.Component('sgd')))\n"
    )
    recipe = find_recipe(f"{file}:recipe").with_setting("model.width", "12")
    record = run_recipe(recipe, folder=create_run_folder(tmp_path / "run", "mine"), seeds=(0,))
    assert record.repetitions[0].status == "done"
