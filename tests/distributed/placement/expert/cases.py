"""What the tests of experts share: a small recipe, and its proof on virtual ranks."""

import dataclasses

import torch

from tests.proving.test_lockstep import case_of, with_settings
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.proof import Proof, Trace
from weft.recipes import pydoc_moe
from weft.specs import as_plan
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["prove_experts", "replicas_of", "small_moe"]


def small_moe(**settings: object) -> Recipe:
    """Momentum shows the size of a gradient in the parameters; 13 samples cannot be dealt out evenly."""
    base = {
        "model.width": 16,
        "model.hidden": 8,
        "model.num_layers": 1,
        "model.num_experts": 4,
        "data.sequence_length": 12,
        "batch_size": 13,
        "optimizer": "momentum",
        "optimizer.lr": 0.1,
        "schedule": "constant",
    }
    return with_settings(pydoc_moe(), **{**base, **settings})


def replicas_of(group: AbstractGroup, plan: str) -> AbstractReplicas:
    chosen = as_plan(plan)
    return replicas_in(MeshGroups(group, chosen.mesh(group.rank)), chosen)


def prove_experts(recipe: Recipe, plan: str, *, num_steps: int = 3, dtype: torch.dtype = torch.float64) -> Proof:
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    case = dataclasses.replace(case_of(recipe, plan, num_steps), tolerance=tolerance, dtype=dtype)

    def program(group: AbstractGroup) -> Trace:
        return trace_ranks(case, replicas_of(group, plan))

    traces = run_virtual(program, case.plan.num_ranks).results
    references = trace_references(case)
    of_ranks = [references[case.plan.mesh(rank).replica] for rank in range(case.plan.num_ranks)]
    return compare_ranks(list(traces), of_ranks, case)
