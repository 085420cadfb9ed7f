"""Fashion-MNIST: 70 000 pictures of clothes, 28 x 28 pixels (Debian package dataset-fashion-mnist)."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["fashion_cnn"]


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
