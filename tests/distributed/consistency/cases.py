"""What the tests of relaxed consistency share: a small recipe, ranks that keep a plan, and proofs of it."""

from collections.abc import Callable
from dataclasses import replace

from tests.distributed.placement.cases import RankOrderGroup
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.proving.lockstep import Lockstep, compare_ranks, trace_ranks, trace_references
from weft.proving.method import Case
from weft.proving.proof import Proof, Trace
from weft.specs import parse_plan
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["MakeReplicas", "long_enough", "make_replicas", "prove", "prove_this_rank", "small_mlp", "trace"]

MakeReplicas = Callable[[AbstractGroup], AbstractReplicas]


def make_replicas(consistency: str) -> MakeReplicas:
    """Sums follow the order of ranks, so that references can be met to the last bit."""

    def make(group: AbstractGroup) -> AbstractReplicas:
        plan = parse_plan(f"data={group.size} consistency={consistency}")
        return replicas_in(MeshGroups(RankOrderGroup(group), plan.mesh(group.rank)), plan)

    return make


def trace(case: Case, make: MakeReplicas | None = None) -> list[Trace]:
    """Of every rank of the case's plan, in rank order."""
    make = make or make_replicas(str(case.plan.consistency))
    return list(run_virtual(lambda group: trace_ranks(case, make(group)), case.plan.num_ranks, timeout=1e6).results)


def long_enough(recipe: Recipe, size: int, consistency: str) -> Case:
    """Three steps of the recipe, or more where that shows too little."""
    plan = parse_plan(f"data={size} consistency={consistency}")
    return case_of(recipe, str(plan), Lockstep().steps_needed(plan, 3))


def prove(
    recipe: Recipe, size: int, consistency: str, make: MakeReplicas | None = None, *, tolerance: float = 1e-5
) -> Proof:
    """Enough steps of the recipe on virtual ranks against the equations of the consistency."""
    case = replace(long_enough(recipe, size, consistency), tolerance=tolerance)
    return compare_ranks(trace(case, make), trace_references(case), case)


def prove_this_rank(consistencies: list[str]) -> list[str]:
    """A rank program: trace this rank of each consistency in turn, and tell what the comparison found of it."""
    group, findings = open_group(find_launch()), []
    try:
        for text in consistencies:
            case = long_enough(small_mlp(), group.size, text)
            found = trace_ranks(case, replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan))
            findings.append(compare_ranks([found], [trace_references(case)[group.rank]], case).finding)
    finally:
        group.close()
    return findings
