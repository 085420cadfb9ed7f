"""A multilayer perceptron."""

import math
from itertools import pairwise

from torch import nn

from weft.errors import RecipeError
from weft.specs import TaskSpec
from weft.training.models.checks import check_dropout, check_positive

__all__ = ["mlp"]


def mlp(task: TaskSpec, *, hidden: tuple[int, ...] = (128,), dropout: float = 0.0) -> nn.Module:
    """[batch, *input] -> [batch, num_outputs], through hidden layers of these sizes (none: a linear model).

    Args:
        hidden: the sizes of the hidden layers.
        dropout: the share of values that training leaves out after each.
    """
    if not task.input.dtype.is_floating_point:
        raise RecipeError(f"mlp takes floating-point inputs (input: {task.input.dtype}); choose a character model")
    check_positive(**{f"hidden[{i}]": size for i, size in enumerate(hidden)})
    check_dropout(dropout)
    layers: list[nn.Module] = [nn.Flatten()]
    sizes = (math.prod(task.input.shape), *hidden)
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], task.num_outputs))
