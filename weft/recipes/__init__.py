"""Complete trainings, ready to run: functions that return a Recipe."""

from weft.recipes.catalogue import BUILT_IN, find_recipe
from weft.recipes.cifar import cifar10_resnet20, cifar10_resnet44
from weft.recipes.digits import digits_cnn, digits_mlp
from weft.recipes.fashion import fashion_cnn, fashion_vgg
from weft.recipes.heat import heat_regression
from weft.recipes.pydoc import pydoc_gpt, pydoc_lstm, pydoc_moe

__all__ = [
    "BUILT_IN",
    "cifar10_resnet20",
    "cifar10_resnet44",
    "digits_cnn",
    "digits_mlp",
    "fashion_cnn",
    "fashion_vgg",
    "find_recipe",
    "heat_regression",
    "pydoc_gpt",
    "pydoc_lstm",
    "pydoc_moe",
]
