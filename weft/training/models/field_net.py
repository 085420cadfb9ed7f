"""A convolutional network from one field on a grid to another, as for the heat equation."""

from itertools import pairwise
from typing import final

from torch import Tensor, nn

from weft.errors import RecipeError
from weft.specs import TaskSpec
from weft.training.models.checks import check_image_task, check_positive

__all__ = ["field_net"]


def field_net(task: TaskSpec, *, width: int = 16, num_layers: int = 3, kernel_size: int = 5) -> nn.Module:
    """[batch, 1, n, m] -> [batch, n * m]: the field and a learned change of it.

    A value can travel num_layers * (kernel_size // 2) grid cells. Beyond the edge the field is zero.

    Args:
        width: channels of the hidden layers.
        kernel_size: sides of a convolution, which must be odd.
    """
    check_image_task(task, "field_net")
    check_positive(width=width, num_layers=num_layers, kernel_size=kernel_size)
    channels, height, breadth = task.input.shape
    if channels != 1 or task.num_outputs != height * breadth:
        numbers = f"input: {task.input.shape}, outputs: {task.num_outputs}"
        raise RecipeError(f"field_net maps one field to one of the same size ({numbers}); choose another model")
    if kernel_size % 2 == 0:
        raise RecipeError(f"kernel has no centre (kernel_size: {kernel_size}); --set model.kernel_size=5")
    return _FieldNet(width, num_layers, kernel_size)


@final
class _FieldNet(nn.Module):
    def __init__(self, width: int, num_layers: int, kernel_size: int) -> None:
        super().__init__()
        channels = [1, *[width] * (num_layers - 1), 1]
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [nn.Conv2d(before, after, kernel_size, padding=kernel_size // 2), nn.GELU()]
        self.change = nn.Sequential(*layers[:-1])

    def forward(self, field: Tensor) -> Tensor:
        change: Tensor = self.change(field)
        return (field + change).flatten(1)
