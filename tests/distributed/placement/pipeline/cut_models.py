"""Models to cut, and stages run one after the other in one process."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.distributed.placement.pipeline.stages import Partition


def run_stages(cut: Partition, inputs: Sequence[Tensor]) -> Any:
    """As ranks would: a stage sees what it says that it takes, and nothing else."""
    known: dict[str, Any] = {f"input/{number}": tensor for number, tensor in enumerate(inputs)}
    for stage in cut.stages:
        outputs = stage.module(*(known[value] for value in stage.inputs))
        assert len(outputs) == len(stage.outputs)
        known |= zip(stage.outputs, outputs, strict=True)
    return known["output"]


def set_training(cut: Partition, is_training: bool) -> None:
    for stage in cut.stages:
        stage.module.train(is_training)


class Skips(nn.Module):
    """A value that two later layers use, an input that the last layer uses, and dropout by the module's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.a(x))
        second = torch.relu(self.norm(self.b(first)))
        third = self.c(second) + first
        out: Tensor = self.d(F.dropout(third + first + x, 0.5, self.training)).view(x.shape[0], 2, 4)
        return out


class Basic(nn.Module):
    """torchvision's block, in short."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        is_same = before == after
        self.downsample = None if is_same else nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """As torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Basic(8, 8, 1), Basic(8, 8, 1))
        self.layer2 = nn.Sequential(Basic(8, 16, 2), Basic(16, 16, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


class Encoded(nn.Module):
    """torch.nn's transformer between an embedding and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length).triu(1).bool()
        out: Tensor = self.head(self.encoder(self.embedding(tokens), mask=mask))
        return out


class Decides(nn.Module):
    """By the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) if x.sum() > 0 else self.b(x)
        return out


class Scaled(nn.Module):
    """By a number that is computed of the size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x)) / (len(x) / 3)
        return out
