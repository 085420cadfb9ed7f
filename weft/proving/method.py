"""The method seam: how a plan is proved whose ranks reach each other in one way or another."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from weft.proving.held import Layout
from weft.proving.proof import Proof
from weft.specs import Plan
from weft.training.datasets import Splits
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["AbstractMethod", "Case", "Evidence"]


@dataclass(frozen=True)
class Case:
    """A training of some steps, from which a proof is made."""

    recipe: Recipe
    splits: Splits
    seed: int
    num_steps: int
    tolerance: float = 1e-5
    device: torch.device | None = None  # of this rank; None as the recipe wishes
    layouts: tuple[Layout, ...] = ()  # of the parts of a model that ranks hold together; none where each holds all
    dtype: torch.dtype | None = None  # in which the model computes; None as the recipe has it

    @property
    def plan(self) -> Plan:
        return self.recipe.mutable.plan


@dataclass(frozen=True)
class Evidence:
    """The traces that the ranks of one run left: tensors of each, by names of the method's own, and the folder in which
    decisions are recorded."""

    ranks: Sequence[dict[str, Tensor]]
    folder: Path


class AbstractMethod(ABC):
    """Ranks call `trace`, each on its own; whoever asked for the proof calls `judge`."""

    @property
    @abstractmethod
    def num_runs(self) -> int:
        """1, or 2 where the decisions of the first run are repeated by a second."""

    @abstractmethod
    def steps_needed(self, plan: Plan, num_steps: int) -> int:
        """So many steps, or more where fewer would not show what the plan does."""

    @abstractmethod
    def trace(self, case: Case, replicas: AbstractReplicas) -> dict[str, Tensor]:
        """Train as one of the ranks, beginning with other weights than rank 0; what is left of it to judge."""

    @abstractmethod
    def judge(self, case: Case, runs: Sequence[Evidence]) -> Proof: ...
