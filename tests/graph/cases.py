"""Small modules that each hold one thing an executor can get wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from weft.graph import Loss
from weft.specs import Batch

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A module, its loss, a batch, and the parameters whose gradients the sink must see."""

    name: str
    module: Callable[[], nn.Module]
    trainable: frozenset[str]
    inputs: tuple[tuple[int, ...], ...] = ((6, 4),)
    targets: tuple[tuple[int, ...], ...] = ((6, 3),)
    unused: frozenset[str] = field(default=frozenset())
    loss: Loss = nn.functional.mse_loss

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return self.module()

    def batch(self, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def draw(shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
            return tuple(torch.randn(shape, generator=generator) for shape in shapes)

        return Batch(draw(self.inputs), draw(self.targets))


class Tied(nn.Module):
    """One weight under two names, as in a language model whose embedding is its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())  # type: ignore[no-any-return]


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 3)
        self.spare = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x).tanh()).tanh())  # type: ignore[no-any-return]


class TwoArms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) * self.right(y)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


class Viewed(nn.Module):
    """Autograd computes one gradient for all three and hands out views of its memory, one of them further back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.tall = nn.Parameter(torch.randn(9, 2))
        self.wide = nn.Parameter(torch.randn(2, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).view(18) + self.tall.view(18) + self.wide.view(18)  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    return module


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def mean_of_both(predictions: Tensor, near: Tensor, far: Tensor) -> Tensor:
    return (predictions - near).square().mean() + 0.5 * (predictions - far).abs().mean()


def of(*layers: str) -> frozenset[str]:
    return frozenset(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))


CASES = (
    Case("mlp", lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), of("0", "2")),
    Case("convolution", convolution, of("0", "1", "4"), inputs=((6, 1, 4, 4),)),
    Case("dropout", lambda: nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3)), of("0", "2")),
    Case("tied", Tied, of("first") | {"last.bias"}, targets=((6, 4),)),
    Case("frozen", frozen, of("2")),
    Case("unused", Unused, of("used", "spare"), unused=of("spare")),
    Case("twice", Twice, of("inner", "last")),
    Case("two arms", TwoArms, of("left", "right"), ((6, 4), (6, 2)), ((6, 3), (6, 3)), loss=mean_of_both),
    Case("scaled", Scaled, of("layer") | {"scale"}),
    Case("viewed", Viewed, of("first") | {"tall", "wide"}, targets=((18,),)),
)
