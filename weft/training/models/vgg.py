"""Convolutions of 3 x 3 in stages, then large linear layers, after VGG (Simonyan and Zisserman, 2015, table 1).

    input -> [conv 3x3, relu] x depth -> max pool 2x2 -> ... -> flatten -> linear -> relu -> dropout -> linear -> ...
             a stage, for each of `channels`                              `------ twice ------------'

Nearly all the time is in the convolutions, and nearly all the parameters are in the linear layers.
"""

from itertools import pairwise

from torch import nn

from weft.specs import TaskSpec
from weft.training.models.checks import check_dropout, check_image_task, check_positive

__all__ = ["vgg"]


def vgg(
    task: TaskSpec,
    *,
    channels: tuple[int, ...] = (16, 32, 64),
    depth: int = 2,
    hidden: int = 1024,
    dropout: float = 0.5,
    batch_norm: bool = False,
) -> nn.Module:
    """[batch, channels, height, width] -> [batch, num_outputs]: stages that halve the sides, and three linear layers.

    Args:
        channels: of each stage.
        depth: convolutions of a stage.
        hidden: the size of the first two linear layers.
        dropout: the share of values that training leaves out after each of these.
        batch_norm: normalise after every convolution.
    """
    check_image_task(task, "vgg", least=2 ** len(channels))
    check_positive(depth=depth, hidden=hidden, **{f"channels[{i}]": number for i, number in enumerate(channels)})
    check_dropout(dropout)
    before, height, width = task.input.shape
    layers: list[nn.Module] = []
    for number in channels:
        for _ in range(depth):
            # A normalisation that follows has a bias of its own.
            layers.append(nn.Conv2d(before, number, kernel_size=3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm2d(number)] if batch_norm else []
            layers.append(nn.ReLU())
            before = number
        layers.append(nn.MaxPool2d(2))
        height, width = height // 2, width // 2
    sizes = (before * height * width, hidden, hidden)
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    net = nn.Sequential(*layers, nn.Linear(hidden, task.num_outputs))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
