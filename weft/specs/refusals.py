"""Combinations that are refused, as rows of a table: each with its reason and the nearest plan that makes sense."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.specs.axes import AXES, DEGREES, Number
from weft.specs.plan import Choice, Plan

__all__ = ["REFUSALS", "Refusal", "check_plan"]


@dataclass(frozen=True)
class Refusal:
    """A combination that makes no sense: why, and the nearest plan that does."""

    applies: Callable[[Plan], bool]
    reason: str
    cure: Callable[[Plan], Plan]


def _with(choice: Choice, **parameters: Number) -> Choice:
    """The choice with other values for some of its parameters."""
    return replace(choice, parameters=tuple({**dict(choice.parameters), **parameters}.items()))


def _is_relaxed(plan: Plan) -> bool:
    """Whether ranks train by themselves, and agree without servers."""
    return plan.consistency.name in ("local", "elastic", "gossip") and plan.channel != "servers"


def _meets_at_servers(plan: Plan) -> bool:
    return plan.channel == "servers" and plan.num_ranks > 1


def _has_own_servers(plan: Plan) -> bool:
    """Whether servers are processes of their own."""
    return plan.topology.get("place", "shared") == "own"


def _commits_by_clock(plan: Plan) -> bool:
    return plan.consistency.name == "stale" and plan.consistency["commit"] == "clock"


def _commits_on_arrival(plan: Plan) -> bool:
    return plan.consistency.name == "async" or plan.consistency.get("commit", "clock") == "arrival"


def _server() -> Choice:
    return Choice("server", tuple(AXES["topology"]["server"].parameters.items()))


def _is_deadline(text: str) -> bool:
    try:
        return text in ("none", "adaptive") or 0 < float(text) < math.inf
    except ValueError:
        return False


def _outer(plan: Plan) -> Mapping[str, Number]:
    """The outer optimizer of a plan with local steps; empty for any other."""
    return dict(plan.consistency.parameters) if plan.consistency.name == "local" else {}


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda plan: plan.consistency.name != "sync" and plan.num_ranks == 1,
        "one rank has nobody to agree with",
        lambda plan: replace(plan, consistency=Choice("sync"), topology=Choice("native")),
    ),
    Refusal(
        lambda plan: plan.shard > 1 and plan.consistency.name != "sync",
        "ranks that hold the optimizer's state together update together, in every step",
        lambda plan: replace(plan, consistency=Choice("sync"), topology=Choice("native")),
    ),
    Refusal(
        lambda plan: plan.shard > 1 and plan.channel == "servers",
        "servers hold the optimizer's state already, each its part",
        lambda plan: replace(plan, data=plan.num_replicas, shard=1),
    ),
    Refusal(
        lambda plan: _meets_at_servers(plan) and plan.topology.name != "server",
        "ranks of this consistency meet at servers",
        lambda plan: replace(plan, topology=_server()),
    ),
    Refusal(
        lambda plan: (
            _meets_at_servers(plan)
            and plan.consistency.name == "backup"
            and int(plan.consistency["workers"]) >= plan.num_ranks
        ),
        "no rank is left whose gradient is waited for",
        lambda plan: replace(plan, consistency=_with(plan.consistency, workers=plan.num_ranks - 1)),
    ),
    Refusal(
        lambda plan: plan.consistency.name == "backup" and not _is_deadline(str(plan.consistency["deadline"])),
        "a deadline is none, adaptive, or seconds above zero",
        lambda plan: replace(plan, consistency=_with(plan.consistency, deadline="adaptive")),
    ),
    Refusal(
        lambda plan: _commits_by_clock(plan) and plan.consistency["lr"] != "share",
        "the gradients of a clock are one update, with the learning rate as it is",
        lambda plan: replace(plan, consistency=_with(plan.consistency, commit="arrival")),
    ),
    Refusal(
        lambda plan: _commits_by_clock(plan) and plan.consistency["bound"] == math.inf,
        "without a bound no rank waits for the gradients that a clock commits together",
        lambda plan: replace(plan, consistency=_with(plan.consistency, commit="arrival")),
    ),
    Refusal(
        lambda plan: _is_relaxed(plan) and plan.topology.name == "server",
        "servers update parameters themselves, and so does every rank of this consistency",
        lambda plan: replace(plan, topology=Choice("native")),
    ),
    Refusal(
        lambda plan: (
            _is_relaxed(plan) and plan.consistency.name in ("elastic", "gossip") and plan.topology.name != "native"
        ),
        "this consistency has no all-reduce whose algorithm could be chosen",
        lambda plan: replace(plan, topology=Choice("native")),
    ),
    Refusal(
        lambda plan: plan.channel == "neighbours" and plan.consistency["mix"] == "after",
        "ranks that may die send their weights before the gradient, and mix what has come",
        lambda plan: replace(plan, consistency=_with(plan.consistency, mix="during")),
    ),
    Refusal(
        lambda plan: (
            _outer(plan).get("outer") == "none"
            and (_outer(plan)["outer_lr"], _outer(plan)["outer_momentum"]) != (0.7, 0.9)
        ),
        "settings of an outer optimizer without one",
        lambda plan: replace(plan, consistency=_with(plan.consistency, outer="nesterov")),
    ),
    Refusal(
        lambda plan: float(_outer(plan).get("outer_momentum", 0.0)) >= 1,
        "momentum of 1 or more never settles",
        lambda plan: replace(plan, consistency=_with(plan.consistency, outer_momentum=0.9)),
    ),
    Refusal(
        lambda plan: plan.consistency.name == "elastic" and float(plan.consistency["beta"]) >= plan.num_ranks,
        "a force of beta / ranks = 1 or more throws a rank to the centre or beyond",
        lambda plan: replace(plan, consistency=_with(plan.consistency, beta=0.9)),
    ),
    Refusal(
        lambda plan: (
            plan.topology.name == "server"
            and not _has_own_servers(plan)
            and int(plan.topology["shards"]) > plan.num_ranks
        ),
        "more server shards than ranks to hold them",
        lambda plan: replace(plan, topology=_with(plan.topology, shards=plan.num_ranks)),
    ),
    Refusal(
        lambda plan: plan.ranks_per_host > 1 and not _commits_on_arrival(plan),
        "a host server joins gradients that are used as they arrive; those of a round are added in the order of ranks",
        lambda plan: replace(plan, topology=_with(plan.topology, inner=1)),
    ),
    Refusal(
        lambda plan: (
            plan.ranks_per_host > 1 and plan.consistency.name == "async" and int(plan.consistency["parts"]) > 1
        ),
        "a host server reaches every shard with every push",
        lambda plan: replace(plan, consistency=_with(plan.consistency, parts=1)),
    ),
    Refusal(
        lambda plan: plan.ranks_per_host > plan.num_ranks,
        "more ranks to a host server than there are",
        lambda plan: replace(plan, topology=_with(plan.topology, inner=plan.num_ranks)),
    ),
    Refusal(
        lambda plan: plan.topology.name == "hierarchical" and plan.num_ranks % int(plan.topology["inner"]) != 0,
        "ranks cannot be cut into inner groups of this size",
        lambda plan: replace(plan, topology=Choice("ring")),
    ),
)


def check_plan(plan: Plan) -> None:
    """Refuse what this version cannot do or what makes no sense."""
    for key, is_available in DEGREES.items():
        if getattr(plan, key) > 1 and not is_available:
            raise PlanError(f"placement is not available in this version ({key}={getattr(plan, key)}); use data=N")
    for key, values in AXES.items():
        choice: Choice = getattr(plan, key)
        if not values[choice.name].is_available:
            known = ", ".join(name for name, value in values.items() if value.is_available)
            raise PlanError(f"value is not available in this version ({key}={choice}); available: {known}")
    for refusal in REFUSALS:
        if refusal.applies(plan):
            raise PlanError(f"plan makes no sense: {refusal.reason} ({plan}); nearest: {refusal.cure(plan)}")
