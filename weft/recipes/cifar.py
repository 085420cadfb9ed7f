"""CIFAR-10 with the residual networks of He et al. (2016, section 4.2)."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["cifar10_resnet20", "cifar10_resnet44"]


def cifar10_resnet20() -> Recipe:
    return _cifar10_resnet(depth=20, accuracy=0.91)


def cifar10_resnet44() -> Recipe:
    return _cifar10_resnet(depth=44, accuracy=0.925)


def _cifar10_resnet(depth: int, accuracy: float) -> Recipe:
    """The paper's recipe: 64 000 steps of 128, the rate cut by ten at one half and at three quarters."""
    return Recipe(
        name=f"cifar10_resnet{depth}",
        description=f"residual network of depth {depth} on CIFAR-10",
        fixed=Fixed(
            model=Component("resnet", depth=depth),
            data=Component("cifar10"),
            loss=Component("cross_entropy"),
            epochs=164,
            metrics=("accuracy",),
        ),
        mutable=Mutable(
            batch_size=128,
            optimizer=Component("momentum", lr=0.1, weight_decay=1e-4),
            schedule=Component("step", milestones=(82.0, 123.0), warmup_epochs=1.0),
        ),
        rules=(Rule("test/accuracy", accuracy),),
    )
