"""What the tests of relaxed consistency share: a small recipe, ranks that keep a plan, and proofs of it."""

from collections.abc import Callable

from tests.distributed.placement.cases import RankOrderGroup
from tests.proving.test_lockstep import small_mlp, splits_of
from weft.proving.relaxed import compare_replicas, first_step_of, steps_needed, trace_replicas
from weft.distributed.group import AbstractGroup
from weft.distributed.group.virtual import run_virtual
from weft.distributed.placement import carry_out
from weft.proving.lockstep import Proof, Trace, trace_ranks
from weft.distributed.place.open_group import meet
from weft.distributed.place.launched import find_place
from weft.specs import parse_plan
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas

__all__ = ["MakeReplicas", "make_replicas", "prove", "prove_this_rank", "small_mlp", "trace"]

MakeReplicas = Callable[[AbstractGroup], AbstractReplicas]


def make_replicas(consistency: str) -> MakeReplicas:
    """Sums follow the order of ranks, so that references can be met to the last bit."""

    def make(group: AbstractGroup) -> AbstractReplicas:
        return carry_out(parse_plan(f"data={group.size} consistency={consistency}"), RankOrderGroup(group))

    return make


def trace(recipe: Recipe, size: int, make: MakeReplicas, num_steps: int, first_step: int = 0) -> list[Trace]:
    splits = splits_of(recipe.fixed.data)
    return list(
        run_virtual(
            lambda group: trace_ranks(recipe, splits, 0, num_steps, make(group), first_step), size, timeout=1e6
        ).results
    )


def prove(
    recipe: Recipe, size: int, consistency: str, make: MakeReplicas | None = None, *, tolerance: float = 1e-5
) -> Proof:
    """Enough steps of the recipe on virtual ranks against the equations of the consistency."""
    choice = parse_plan(f"data={size} consistency={consistency}").consistency
    num_steps = steps_needed(choice, 3)
    ranks = trace(recipe, size, make or make_replicas(consistency), num_steps, first_step_of(choice))
    references = trace_replicas(recipe, splits_of(recipe.fixed.data), 0, num_steps, size, choice)
    return compare_replicas(ranks, references, tolerance)


def prove_this_rank(consistencies: list[str]) -> list[str]:
    """A rank program: trace this rank of each consistency in turn, and tell what the comparison found of it."""
    group, recipe = meet(find_place()), small_mlp()
    splits, findings = splits_of(recipe.fixed.data), []
    try:
        for text in consistencies:
            plan = parse_plan(f"data={group.size} consistency={text}")
            num_steps = steps_needed(plan.consistency, 3)
            found = trace_ranks(recipe, splits, 0, num_steps, carry_out(plan, group))
            references = trace_replicas(recipe, splits, 0, num_steps, group.size, plan.consistency)
            findings.append(compare_replicas([found], [references[group.rank]]).finding)
    finally:
        group.close()
    return findings
