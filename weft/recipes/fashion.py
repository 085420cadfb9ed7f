"""Fashion-MNIST: 70 000 pictures of clothes, 28 x 28 pixels (Debian package dataset-fashion-mnist)."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["fashion_cnn", "fashion_vgg"]


def fashion_cnn() -> Recipe:
    """Seen: 0.905 on the test split after three epochs, 0.909 after five."""
    return Recipe(
        name="fashion_cnn",
        description="LeNet-style network on Fashion-MNIST",
        fixed=Fixed(
            model=Component("lenet"),
            data=Component("fashion_mnist"),
            loss=Component("cross_entropy"),
            epochs=5,
            metrics=("accuracy",),
            target=Rule("accuracy", 0.9),
        ),
        mutable=Mutable(
            batch_size=64,
            optimizer=Component("adam", lr=1e-3),
            schedule=Component("cosine"),
        ),
        rules=(Rule("test/accuracy", 0.89),),
    )


def fashion_vgg() -> Recipe:
    """Four fifths of the parameters are in the linear layers, and nearly all of the time in the convolutions."""
    return Recipe(
        name="fashion_vgg",
        description="VGG-style network with large linear layers on Fashion-MNIST",
        fixed=Fixed(
            model=Component("vgg"),
            data=Component("fashion_mnist"),
            loss=Component("cross_entropy"),
            epochs=5,
            metrics=("accuracy",),
            target=Rule("accuracy", 0.91),
        ),
        mutable=Mutable(
            batch_size=64,
            optimizer=Component("adam", lr=5e-4),
            schedule=Component("cosine"),
        ),
        rules=(Rule("test/accuracy", 0.9),),
    )
