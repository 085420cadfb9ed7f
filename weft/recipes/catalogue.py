"""Every built-in recipe by name, and a user's own by path."""

from collections.abc import Callable, Mapping

from weft.errors import RecipeError, nearest
from weft.recipes.cifar import cifar10_resnet20, cifar10_resnet44
from weft.recipes.digits import digits_cnn, digits_mlp
from weft.recipes.fashion import fashion_cnn, fashion_vgg
from weft.recipes.heat import heat_regression
from weft.recipes.pydoc import pydoc_gpt, pydoc_lstm, pydoc_moe
from weft.training.component import find_by_path
from weft.training.recipe import Recipe

__all__ = ["BUILT_IN", "find_recipe"]

BUILT_IN: Mapping[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        digits_mlp,
        digits_cnn,
        fashion_cnn,
        fashion_vgg,
        cifar10_resnet20,
        cifar10_resnet44,
        pydoc_lstm,
        pydoc_gpt,
        pydoc_moe,
        heat_regression,
    )
}


def find_recipe(name: str) -> Recipe:
    """The recipe of a built-in name, or what the function at `file.py:function` or `module:function` returns."""
    if ":" in name:
        recipe = find_by_path(name)()
        if not isinstance(recipe, Recipe):
            raise RecipeError(f"function does not return a recipe ({name}: {type(recipe).__name__})")
        return recipe
    if name not in BUILT_IN:
        raise RecipeError(f"unknown recipe ({name}); {nearest(name, BUILT_IN)}")
    return BUILT_IN[name]()
