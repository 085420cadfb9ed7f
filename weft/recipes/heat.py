"""The 2-D heat equation as a regression problem, made on the fly."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["heat_regression"]


def heat_regression() -> Recipe:
    """Seen: 0.008 after eight epochs, 0.0065 after twenty; the field's values are of the order of one."""
    return Recipe(
        name="heat_regression",
        description="network that solves the 2-D heat equation: the field now -> the field later",
        fixed=Fixed(
            model=Component("field_net"),
            data=Component("heat"),
            loss=Component("mse"),
            epochs=20,
            metrics=("l2_error", "max_error"),
            target=Rule("l2_error", 0.008),
        ),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adam", lr=2e-3),
            schedule=Component("cosine"),
        ),
        rules=(Rule("test/l2_error", 0.01),),
    )
