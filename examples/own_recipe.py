"""A recipe of one's own, with a model and data of one's own: weft run examples/own_recipe.py:recipe"""

import numpy as np
from torch import nn

from weft import Component, Fixed, Mutable, Recipe, Rule
from weft.specs import TaskSpec
from weft.training.datasets import Splits, splits_from_arrays

HERE = "examples/own_recipe.py"  # as seen from the folder where weft is run


def spirals(*, num_samples: int = 1500, noise: float = 0.02) -> Splits:
    """Points on three spirals that wind around each other. Options are keyword-only, and `--set` can change them."""
    draws = np.random.default_rng(0)
    arm = draws.integers(3, size=num_samples)
    radius = draws.uniform(0.1, 1.0, size=num_samples)
    angle = 4 * radius + arm * 2 * np.pi / 3
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += draws.normal(scale=noise, size=points.shape)
    num_train = num_samples * 4 // 5
    return splits_from_arrays(points[:num_train], arm[:num_train], points[num_train:], arm[num_train:])


def network(task: TaskSpec, *, width: int = 32) -> nn.Module:
    """The task says what goes in and how many numbers come out; here two coordinates and three scores."""
    return nn.Sequential(
        nn.Linear(task.input.shape[0], width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, task.num_outputs),
    )


def recipe() -> Recipe:
    return Recipe(
        name="spirals",
        description="three spirals told apart",
        fixed=Fixed(
            model=Component(f"{HERE}:network", width=32),
            data=Component(f"{HERE}:spirals"),
            loss=Component("cross_entropy"),
            epochs=60,
            metrics=("accuracy",),
            target=Rule("accuracy", 0.99),
        ),
        mutable=Mutable(
            batch_size=32,
            optimizer=Component("adam", lr=0.01),
            schedule=Component("cosine", warmup_epochs=1.0),
        ),
        rules=(Rule("test/accuracy", 0.97),),
    )
