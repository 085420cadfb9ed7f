"""Products of placements with consistency, topology, compression and shares: each trains as its reference does, or is
refused before anything starts, with a nearest plan that is not.

Every pair of values that makes sense is in one of the plans at least; of all products there would be thousands.
"""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.distributed.placement.expert.cases import small_moe
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.realise import RunSpec
from weft.errors import PlanError
from weft.proving.method import Evidence
from weft.proving.plan_proof import method_of
from weft.proving.proof import Proof
from weft.specs import parse_plan

PLACEMENTS = (
    "tensor=2",
    "pipeline=2",
    "pipeline=2 tensor=2",
    "pipeline=2 tensor=1:2",
    "shard=2",
    "shard=2 shard_level=2",
    "shard=2 shard_level=3",
    "shard=2 tensor=2",
    "shard=2 pipeline=2",
    "linear=2",
    "linear=2 shard=2",
    "linear=2 pipeline=2",
    "expert=2",
)
CONSISTENCIES = (
    "sync",
    "local(2)",
    "elastic(2)",
    "gossip",
    "gossip(mix=pair)",
    "async",
    "stale(1)",
    "backup(1)",
)
TOPOLOGIES = ("native", "ring", "hierarchical(2)", "server(1)", "server(2)", "server(1,own)")
COMPRESSIONS = ("none", "bf16")
SHARES = ("equal", "measured(2)")


def refused(text: str) -> bool:
    """Whether a plan makes no sense; then the one that is told does."""
    try:
        parse_plan(text)
    except PlanError as error:
        parse_plan(str(error).rpartition("nearest: ")[2])
        return True
    return False


def spell(row: tuple[str, ...]) -> str:
    return "data=2 {} consistency={} topology={} compress={} share={}".format(*row)


@cache
def sound_plans() -> list[str]:
    """Of those that make sense, some in which every pair of values occurs that occurs in any: greedy, and the same
    every time."""
    everything = product(PLACEMENTS, CONSISTENCIES, TOPOLOGIES, COMPRESSIONS, SHARES)
    pairs = {spell(row): set(combinations(enumerate(row), 2)) for row in everything if not refused(spell(row))}
    missing, chosen = set().union(*pairs.values()), list[str]()
    while missing:
        chosen.append(max(pairs, key=lambda text: len(pairs[text] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def prove(text: str, folder: Path) -> Proof:
    recipe = small_moe() if "expert" in text else small_mlp()
    case, method = case_of(recipe, text, 3), method_of(parse_plan(text))
    num_steps = method.steps_needed(case.plan, 3)
    # In 64 bits: with rounding, an activation that is all but zero falls on the other side of it.
    case, runs = replace(case, num_steps=num_steps, dtype=torch.float64, tolerance=1e-9), list[Evidence]()
    for number in range(method.num_runs):
        spec = RunSpec.of(case.recipe, (0,), run=folder / str(number), replay=runs[0].folder if runs else None)
        found = run_plan(case.plan, lambda _group, replicas: method.trace(case, replicas), spec=spec).results
        runs.append(Evidence(list(found[: case.plan.num_ranks]), folder / str(number)))
    return method.judge(case, runs)


@pytest.mark.parametrize("number", range(len(sound_plans())))
def test_a_product_trains_as_its_reference_does(number: int, tmp_path: Path) -> None:
    proof = prove(sound_plans()[number], tmp_path)
    assert proof.passed, f"{sound_plans()[number]}: {proof.finding}"


def test_what_is_sound_is_not_refused() -> None:
    """So that a row too many in the table of refusals is seen."""
    found = " ".join(sound_plans())
    for split, consistency in product(("tensor=2", "pipeline=2"), CONSISTENCIES):
        is_in_pairs = "pair" in consistency
        assert (f"{split} consistency={consistency} " in found) != is_in_pairs
    for placement in (*PLACEMENTS[:10], "expert=2"):
        assert f"data=2 {placement} consistency=sync " in found
