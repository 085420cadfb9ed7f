"""A plan proved on virtual ranks: what the tests of several placements share."""

import dataclasses

import torch

from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, with_settings
from weft.distributed.realise import RunSpec
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.proof import Proof
from weft.recipes import digits_cnn
from weft.training.recipe import Recipe

__all__ = ["prove_on_virtual_ranks", "small_net"]

STEPS = 3


def small_net(model: str, **settings: object) -> Recipe:
    """A network on 8 x 8 digits. Momentum shows the size of a gradient in the parameters; the last batch of an epoch is
    ragged."""
    base = {"model": model, "batch_size": 67, "optimizer": "momentum", "optimizer.lr": 0.1, "schedule": "constant"}
    return with_settings(digits_cnn(), **{**base, **settings})


def prove_on_virtual_ranks(
    recipe: Recipe, plan: str, *, dtype: torch.dtype = torch.float64, num_steps: int = STEPS
) -> Proof:
    """Against one rank: to 1e-11 of each tensor's largest value in float64, to 1e-5 in float32."""
    tolerance = 1e-11 if dtype is torch.float64 else 1e-5
    case = dataclasses.replace(case_of(recipe, plan, num_steps), tolerance=tolerance, dtype=dtype)
    spec = RunSpec.of(case.recipe, (0,))
    traces = run_plan(case.plan, lambda _group, replicas: trace_ranks(case, replicas), spec=spec).results
    references = trace_references(case)
    of_ranks = [references[case.plan.mesh(rank).replica] for rank in range(case.plan.num_ranks)]
    return compare_ranks(list(traces), of_ranks, case)
