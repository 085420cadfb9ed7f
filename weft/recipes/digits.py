"""Handwritten digits of 8 x 8 pixels: real data that ships with scikit-learn, and the demo."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["digits_cnn", "digits_mlp"]


def digits_mlp() -> Recipe:
    """A small perceptron on handwritten digits (a few seconds)."""
    return Recipe(
        name="digits_mlp",
        description="a small perceptron on handwritten digits (a few seconds)",
        fixed=Fixed(
            model=Component("mlp", hidden=(128, 64)),
            data=Component("digits"),
            loss=Component("cross_entropy"),
            epochs=40,
            metrics=("accuracy",),
        ),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adam", lr=2e-3),
            schedule=Component("cosine", warmup_epochs=1.0),
        ),
        rules=(Rule("test/accuracy", 0.97),),
    )
