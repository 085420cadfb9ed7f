"""Characters of Python's own documentation, which ships with CPython."""

from weft.metrics.metric import Rule
from weft.training.component import Component
from weft.training.recipe import Fixed, Mutable, Recipe

__all__ = ["pydoc_gpt", "pydoc_lstm", "pydoc_moe"]


def pydoc_lstm() -> Recipe:
    """Seen: 1.67 on the test split."""
    return Recipe(
        name="pydoc_lstm",
        description="LSTM that predicts the next character of Python's documentation",
        fixed=_fixed(Component("char_lstm"), epochs=3),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adam", lr=4e-3),
            schedule=Component("cosine", warmup_epochs=0.1),
            clip_norm=1.0,
        ),
        rules=(Rule("test/loss", 1.75),),
    )


def pydoc_gpt() -> Recipe:
    """Seen: 1.76 on the test split."""
    return Recipe(
        name="pydoc_gpt",
        description="small GPT that predicts the next character of Python's documentation",
        fixed=_fixed(Component("char_gpt"), epochs=3),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adamw", lr=2e-3, weight_decay=0.01),
            schedule=Component("cosine", warmup_epochs=0.2),
            clip_norm=1.0,
        ),
        rules=(Rule("test/loss", 1.85),),
    )


def pydoc_moe() -> Recipe:
    """Seen: 1.69 on the test split."""
    return Recipe(
        name="pydoc_moe",
        description="small GPT with experts that predicts the next character of Python's documentation",
        fixed=_fixed(Component("char_moe"), epochs=3),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adamw", lr=2e-3, weight_decay=0.01),
            schedule=Component("cosine", warmup_epochs=0.2),
            clip_norm=1.0,
        ),
        rules=(Rule("test/loss", 1.85),),
    )


def _fixed(model: Component, epochs: float) -> Fixed:
    return Fixed(
        model=model,
        data=Component("pydoc", sequence_length=64),
        loss=Component("cross_entropy"),
        epochs=epochs,
        metrics=("accuracy",),
    )
