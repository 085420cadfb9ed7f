"""The residual networks for CIFAR of He et al. (2016), section 4.2: depth 6n + 2.

    input -> conv 3x3 -> n blocks of `width` -> n of 2 x width -> n of 4 x width -> mean over the image -> linear
                         stride 1               first has stride 2  first has stride 2

A block is two 3 x 3 convolutions. Where it changes shape its shortcut is of option A (every second pixel, new channels
zero, no parameters; what the paper uses for CIFAR) or B (a 1 x 1 convolution).
"""

from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import RecipeError
from weft.specs import TaskSpec
from weft.training.models.checks import check_image_task, check_positive

__all__ = ["resnet"]


def resnet(task: TaskSpec, *, depth: int = 20, width: int = 16, shortcut: Literal["A", "B"] = "A") -> nn.Module:
    """[batch, channels, height, width] -> [batch, num_outputs], with depth - 1 convolutions on the longest way.

    Args:
        depth: 6 n + 2, for n blocks in each of three stages.
        width: channels of the first stage; each of the others has twice those of the one before.
        shortcut: around a block that halves the sides: A, a cut without parameters; B, a convolution.
    """
    check_image_task(task, "resnet")
    check_positive(width=width)
    if depth < 8 or depth % 6 != 2:
        below = max(8, depth - (depth - 2) % 6)
        raise RecipeError(f"depth of a CIFAR ResNet is 6n + 2 (depth: {depth}); --set model.depth={below}")
    layers: list[nn.Module] = [_conv3x3(task.input.shape[0], width), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            after, stride = width * 2**stage, 2 if stage > 0 and block == 0 else 1
            layers.append(_Block(before, after, stride, shortcut))
            before = after
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, task.num_outputs))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


@final
class _Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x))))))"""

    def __init__(self, before: int, after: int, stride: int, shortcut: Literal["A", "B"]) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            _conv3x3(before, after, stride),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            _conv3x3(after, after),
            nn.BatchNorm2d(after),
        )
        self.shortcut: nn.Module
        if before == after and stride == 1:
            self.shortcut = nn.Identity()
        elif shortcut == "A":
            self.shortcut = _Subsample(stride, num_new=after - before)
        else:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.residual(x))


@final
class _Subsample(nn.Module):
    """Every `stride`-th pixel of each row and column, and `num_new` channels of zeros after the others."""

    def __init__(self, stride: int, num_new: int) -> None:
        super().__init__()
        self.stride = stride
        self.num_new = num_new

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.num_new))


def _conv3x3(before: int, after: int, stride: int = 1) -> nn.Conv2d:
    # The normalisation that follows has a bias of its own.
    return nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
