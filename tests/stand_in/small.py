"""A training of a few steps that uses all a device must keep: dropout, running statistics, clipping, accumulation."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from weft.recipes import digits_mlp
from weft.specs import TaskSpec
from weft.training.component import Component
from weft.training.optimizers import AbstractOptimizer, TorchOptimizer
from weft.training.recipe import Recipe

__all__ = ["folder_for", "nadam", "normed", "small_recipe", "stray"]


def normed(task: TaskSpec) -> nn.Module:
    """A model with running statistics, and with dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.ReLU(), nn.Linear(8, task.num_outputs)
    )


class Stray(nn.Module):
    """A layer that forgets where its input is."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape)


def stray(task: TaskSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.num_outputs), Stray())


def nadam(*, lr: float = 0.01) -> AbstractOptimizer:
    """One of torch.optim, whose state has counters of no dimensions."""
    return TorchOptimizer(torch.optim.NAdam, lr=lr)


def small_recipe(plan: str = "", **settings: object) -> Recipe:
    """Digits in six steps, two of which are seen by an evaluation; the last batch is ragged."""
    recipe = digits_mlp()
    recipe = replace(recipe, fixed=replace(recipe.fixed, model=Component(f"{__name__}:normed")), rules=())
    defaults: dict[str, object] = {"epochs": 1, "batch_size": 256, "evaluate_every": 0.5, "schedule": "constant"}
    for key, value in {**defaults, "plan": plan, **settings}.items():
        recipe = recipe.with_setting(key.replace("__", "."), str(value))
    return recipe


def folder_for(path: Path, name: str) -> Path:
    """A folder that whoever of several ranks comes first makes."""
    folder = path / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
