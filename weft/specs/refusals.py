"""Combinations that are refused, as rows of a table: each with its reason and the nearest plan that makes sense."""

from dataclasses import replace

from weft.errors import PlanError
from weft.specs.axes import AXES, Limit
from weft.specs.compression_refusals import COMPRESSION_REFUSALS
from weft.specs.placement_refusals import PLACEMENT_REFUSALS
from weft.specs.plan import Choice, Plan, value_of
from weft.specs.refusal import Refusal, with_parameters

__all__ = ["REFUSALS", "Refusal", "check_plan", "nearest_to", "refusals_of"]


def _is_relaxed(plan: Plan) -> bool:
    """Whether ranks train by themselves, and agree without servers."""
    return plan.sends == "weights" and plan.channel != "servers"


def _meets_at_servers(plan: Plan) -> bool:
    return plan.channel == "servers" and plan.num_replicas > 1


def _has_own_servers(plan: Plan) -> bool:
    """Whether servers are processes of their own."""
    return plan.topology.get("place", "shared") == "own"


def _server() -> Choice:
    return Choice("server", tuple(AXES["topology"]["server"].parameters.items()))


REFUSALS: tuple[Refusal, ...] = (
    *PLACEMENT_REFUSALS,
    *COMPRESSION_REFUSALS,
    Refusal(
        lambda plan: not plan.is_synchronous and plan.num_replicas == 1,
        "one replica has nobody to agree with",
        lambda plan: replace(plan, consistency=Choice("sync"), topology=Choice("native")),
    ),
    Refusal(
        lambda plan: _meets_at_servers(plan) and plan.topology.name != "server",
        "ranks of this consistency meet at servers",
        lambda plan: replace(plan, topology=_server()),
    ),
    Refusal(
        lambda plan: _is_relaxed(plan) and plan.topology.name == "server",
        "servers update parameters themselves, and so does every rank of this consistency",
        lambda plan: replace(plan, topology=Choice("native")),
    ),
    Refusal(
        lambda plan: (
            _is_relaxed(plan)
            and not value_of("consistency", plan.consistency).traits.has_all_reduce
            and plan.topology.name != "native"
        ),
        "this consistency has no all-reduce whose algorithm could be chosen",
        lambda plan: replace(plan, topology=Choice("native")),
    ),
    Refusal(
        lambda plan: (
            plan.topology.name == "server"
            and not _has_own_servers(plan)
            and int(plan.topology["shards"]) > plan.num_replicas
        ),
        "more server shards than ranks to hold them",
        lambda plan: replace(plan, topology=with_parameters(plan.topology, shards=plan.num_replicas)),
    ),
    Refusal(
        lambda plan: plan.ranks_per_host > 1 and not (plan.commits_on_arrival and plan.sends != "weights"),
        "a host server joins gradients that are used as they arrive; those of a round are added in the order of ranks",
        lambda plan: replace(plan, topology=with_parameters(plan.topology, inner=1)),
    ),
    Refusal(
        lambda plan: plan.ranks_per_host > 1 and int(plan.consistency.get("parts", 1)) > 1,
        "a host server reaches every shard with every push",
        lambda plan: replace(plan, consistency=with_parameters(plan.consistency, parts=1)),
    ),
    Refusal(
        lambda plan: plan.ranks_per_host > plan.num_replicas,
        "more ranks to a host server than there are",
        lambda plan: replace(plan, topology=with_parameters(plan.topology, inner=plan.num_replicas)),
    ),
    Refusal(
        lambda plan: plan.topology.name == "hierarchical" and plan.num_replicas % int(plan.topology["inner"]) != 0,
        "ranks cannot be cut into inner groups of this size",
        lambda plan: replace(plan, topology=Choice("ring")),
    ),
)


MOST_FAULTS = 16
"""Of one plan."""


def refusals_of(axis: str, choice: Choice) -> tuple[Refusal, ...]:
    """The rules of a value's own parameters."""
    return tuple(_of_limit(axis, limit) for limit in value_of(axis, choice).limits)


def _of_limit(axis: str, limit: Limit) -> Refusal:
    def applies(plan: Plan) -> bool:
        return limit.applies(dict(getattr(plan, axis).parameters), plan.num_replicas)

    def cure(plan: Plan) -> Plan:
        changed = with_parameters(getattr(plan, axis), **limit.cure(plan.num_replicas))
        return replace(plan, **{axis: changed})  # type: ignore[arg-type]

    return Refusal(applies, limit.reason, cure)


def check_plan(plan: Plan) -> None:
    """Refuse what this version cannot do or what makes no sense."""
    if isinstance(plan.tensor, tuple) and len(plan.tensor) != plan.pipeline:
        why = "every stage has its own number of ways, or all have the same"
        nearest = replace(plan, tensor=max(plan.tensor))
        raise PlanError(f"plan makes no sense: {why} ({plan}); nearest: {nearest}")
    for key, values in AXES.items():
        choice: Choice = getattr(plan, key)
        if not values[choice.name].is_available:
            known = ", ".join(name for name, value in values.items() if value.is_available)
            raise PlanError(f"value is not available in this version ({key}={choice}); available: {known}")
    refusal = _first_against(plan)
    if refusal is not None:
        raise PlanError(f"plan makes no sense: {refusal.reason} ({plan}); nearest: {nearest_to(plan)}")


def nearest_to(plan: Plan) -> Plan:
    """A plan that makes sense: cured of one fault after the other, for a cure may bring out another."""
    for _ in range(MOST_FAULTS):
        refusal = _first_against(plan)
        if refusal is None:
            return plan
        plan = refusal.cure(plan)
    raise AssertionError(f"cures lead nowhere ({plan})")


def _first_against(plan: Plan) -> Refusal | None:
    own = [refusal for key in AXES for refusal in refusals_of(key, getattr(plan, key))]
    return next((refusal for refusal in (*REFUSALS, *own) if refusal.applies(plan)), None)
