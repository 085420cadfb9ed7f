"""The deaths that a run of a plan survives."""

from weft.engines.engine import Tolerance
from weft.errors import UsageError
from weft.specs import Plan

__all__ = ["check_restarts", "tolerance_of"]


def tolerance_of(plan: Plan, restarts: int = 0) -> Tolerance:
    """Which processes a run can lose.

    Args:
        restarts: how often workers that were lost are started again, in all.
    """
    roles = plan.roles
    return Tolerance(roles.expendable, roles.restored, most_returns=restarts)


def check_restarts(plan: Plan, num_seeds: int) -> None:
    """Raise UsageError where no worker that was lost can be taken back."""
    # A host server may still hold a gradient of the life before, which the shards would take for one of the new.
    if plan.channel != "servers" or plan.num_hosts or not plan.roles.expendable:
        cure = "use servers without inner, and more ranks than shards or place=own"
        raise UsageError(f"plan has no worker that can be started again ({plan}); leave --restarts out, or {cure}")
    if num_seeds > 1:
        raise UsageError(f"workers are started again in a run of one seed (seeds: {num_seeds}); leave --repeat out")
