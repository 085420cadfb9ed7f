"""The axes of a plan: the values of each, with their parameters, as rows of a table."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.specs.roles import Channel

__all__ = ["AXES", "DEGREES", "Limit", "Number", "Sends", "Traits", "Value"]

Number = int | float | str

Sends = Literal["gradient", "difference", "weights"]
"""The tensors that ranks send: gradients, differences of weights that a rank's own update made, or weights."""


@dataclass(frozen=True)
class Traits:
    """The properties of a consistency that others ask for, so that nobody asks for its name.

    Two parameters speak for traits where a value has them: `commit`, and `push` for what it sends.

    Args:
        is_synchronous: ranks meet in every step, and have the bits of one rank.
        sends: the tensors that are exchanged. Ranks that send weights or differences make updates of their own.
        commit: servers update once for the gradients of a round (or a clock), or for each push as it arrives.
        has_all_reduce: ranks in a group all-reduce, by an algorithm that the topology may choose.
        skips_rounds: a rank leaves out the rounds that it is late for.
    """

    is_synchronous: bool = False
    sends: Sends = "gradient"
    commit: Literal["round", "arrival"] = "round"
    has_all_reduce: bool = False
    skips_rounds: bool = False


@dataclass(frozen=True)
class Limit:
    """Parameters of a value that make no sense: why, and what to write instead.

    Args:
        applies: a function of the parameters and the number of ranks.
        cure: from the number of ranks to parameters that make sense.
    """

    applies: Callable[[Mapping[str, Any], int], bool]
    reason: str
    cure: Callable[[int], Mapping[str, Number]]


@dataclass(frozen=True)
class Value:
    """One value that an axis can take: its parameters with their defaults, and whether this version has it.

    `words` lists what a parameter that is a word may say; `least` is the smallest value of a number that may be zero;
    `unbounded` names the numbers that may be `inf`; `limits` are the other rules of its parameters.

    Of a consistency, `realised_by` is the import path of its implementation for each channel that it has: in a group of
    all ranks a function of (group, choice, codec) that returns a scheme, at servers one of (choice, num_workers,
    is_fresh) that returns a policy. Synchronous ranks of a group need no scheme, and neighbours have a channel of their
    own: there the path says where to look, and is not called. `neighbours_if` names the words of parameters with which
    ranks reach their neighbours alone. `equations` are those that a proof holds ranks to, for each channel whose proof
    asks for some: in a group a subclass of AbstractEquations, at servers a function of (case, decisions) that returns
    the tensors that the training should end with.

    Two parameters mean the same in every consistency: `steps` from one exchange to the next, and `after` so many
    synchronous steps.

    Of a compression, `realised_by` is, for each channel that can carry it, a function of (choice) that returns a codec,
    and `equations` the rounding that proofs hold it to. Of a topology, `rounds_once` says that sums are made in the
    order of ranks, those of 16-bit floats in 32 bits. `cost` is the import path of what the value costs, in
    weft/planning, where the arguments of each axis' functions are told.
    """

    parameters: Mapping[str, Number] = field(default_factory=dict)
    is_available: bool = False
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: Mapping[str, Number] = field(default_factory=dict)
    unbounded: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    traits: Traits = Traits()
    realised_by: Mapping[Channel, str] = field(default_factory=dict)
    neighbours_if: Mapping[str, str] = field(default_factory=dict)
    equations: Mapping[Channel, str] = field(default_factory=dict)
    rounds_once: bool = False
    cost: str = ""


def _is_deadline(text: str) -> bool:
    try:
        return text in ("none", "adaptive") or 0 < float(text) < math.inf
    except ValueError:
        return False


_SCHEMES, _POLICIES = "weft.distributed.consistency", "weft.distributed.consistency.server.policies"
_EQUATIONS, _FOLLOW_GRADIENTS = "weft.proving.relaxed_equations", "weft.proving.served:follow_recipe"
_COSTS, _COLLECTIVES = "weft.planning.plan_cost", "weft.planning.collective_cost"


def _codec(made_by: str, rounding: str, cost: str) -> Value:
    """A codec that every channel can carry."""
    channels: tuple[Channel, ...] = ("all_reduce", "servers", "neighbours")
    return Value(
        is_available=True,
        realised_by=dict.fromkeys(channels, f"weft.distributed.codecs.{made_by}"),
        equations=dict.fromkeys(channels, f"weft.proving.rounding:{rounding}"),
        cost=f"weft.planning.codec_cost:{cost}",
    )


_PIPELINE = "weft.distributed.placement.pipeline"
_SHARES, _CUTS = "weft.planning.placement_cost:share_cost", "weft.planning.placement_cost:cut_cost"


def _schedule(made_by: str, parameters: Mapping[str, Number] | None = None, **options: Any) -> Value:
    """An order of micro-batches, made by a function of (num_stages, choice)."""
    return Value(
        {"micro": 8} if parameters is None else parameters,
        is_available=True,
        realised_by={"all_reduce": f"{_PIPELINE}.schedules:{made_by}"},
        cost="weft.planning.placement_cost:pipeline_cost",
        **options,
    )


AXES: Mapping[str, Mapping[str, Value]] = {
    "shard_level": {
        level: Value(
            {"offload": "none"},
            is_available=True,
            words={"offload": ("none", "disk")},
            cost="weft.planning.placement_cost:sharded_cost",
        )
        for level in ("1", "2", "3")
    },
    "schedule": {
        "gpipe": _schedule("gpipe"),
        "1f1b": _schedule("one_forward_one_backward"),
        "interleaved": _schedule("interleaved", {"micro": 8, "chunks": 2}),
        "zero_bubble": _schedule("zero_bubble"),
        "pipedream": _schedule("pipedream", {"sync": "own"}, words={"sync": ("own", "vertical")}),
    },
    "cut": {
        costs: Value(
            {"stages": "equal", "memory": math.inf},
            is_available=True,
            words={"stages": ("equal", "measured")},
            unbounded=("memory",),
            cost=_CUTS,
        )
        for costs in ("flops", "time", "parameters")
    },
    "share": {
        "equal": Value(is_available=True, cost=_SHARES),
        "measured": Value({"every": 20}, is_available=True, cost=_SHARES),
    },
    "consistency": {
        "sync": Value(
            is_available=True,
            traits=Traits(is_synchronous=True, has_all_reduce=True),
            realised_by={
                "all_reduce": "weft.distributed.placement:DataParallel",
                "servers": f"{_POLICIES}:synchronous",
            },
            cost=f"{_COSTS}:synchronous",
        ),
        "backup": Value(
            {"workers": 1, "deadline": "none"},
            is_available=True,
            least={"workers": 0},
            limits=(
                Limit(
                    lambda given, num_ranks: 1 < num_ranks <= given["workers"],
                    "no rank is left whose gradient is waited for",
                    lambda num_ranks: {"workers": num_ranks - 1},
                ),
                Limit(
                    lambda given, _: not _is_deadline(str(given["deadline"])),
                    "a deadline is none, adaptive, or seconds above zero",
                    lambda _: {"deadline": "adaptive"},
                ),
            ),
            traits=Traits(skips_rounds=True),
            realised_by={"servers": f"{_POLICIES}:backup"},
            equations={"servers": _FOLLOW_GRADIENTS},
            cost=f"{_COSTS}:served",
        ),
        "stale": Value(
            {"bound": 3, "commit": "clock", "lr": "share"},
            is_available=True,
            words={"commit": ("clock", "arrival"), "lr": ("share", "staleness", "full")},
            least={"bound": 0},
            unbounded=("bound",),
            limits=(
                Limit(
                    lambda given, _: given["commit"] == "clock" and given["lr"] != "share",
                    "the gradients of a clock are one update, with the learning rate as it is",
                    lambda _: {"commit": "arrival"},
                ),
                Limit(
                    lambda given, _: given["commit"] == "clock" and given["bound"] == math.inf,
                    "without a bound no rank waits for the gradients that a clock commits together",
                    lambda _: {"commit": "arrival"},
                ),
            ),
            realised_by={"servers": f"{_POLICIES}:stale"},
            equations={"servers": _FOLLOW_GRADIENTS},
            cost=f"{_COSTS}:served",
        ),
        "async": Value(
            {"lr": "share", "push": "gradient", "parts": 1},
            is_available=True,
            words={"lr": ("share", "staleness", "full"), "push": ("gradient", "difference")},
            traits=Traits(commit="arrival"),
            realised_by={"servers": f"{_POLICIES}:asynchronous"},
            equations={"servers": _FOLLOW_GRADIENTS},
            cost=f"{_COSTS}:served",
        ),
        "local": Value(
            {"steps": 8, "state": "keep", "after": 0, "outer": "none", "outer_lr": 0.7, "outer_momentum": 0.9},
            is_available=True,
            words={"state": ("keep", "mean"), "outer": ("none", "nesterov")},
            limits=(
                Limit(
                    lambda given, _: (
                        given["outer"] == "none" and (given["outer_lr"], given["outer_momentum"]) != (0.7, 0.9)
                    ),
                    "settings of an outer optimizer without one",
                    lambda _: {"outer": "nesterov"},
                ),
                Limit(
                    lambda given, _: given["outer_momentum"] >= 1,
                    "momentum of 1 or more never settles",
                    lambda _: {"outer_momentum": 0.9},
                ),
            ),
            traits=Traits(sends="weights", has_all_reduce=True),
            realised_by={"all_reduce": f"{_SCHEMES}.local:make_local"},
            equations={"all_reduce": f"{_EQUATIONS}:LocalEquations"},
            cost=f"{_COSTS}:local",
        ),
        "elastic": Value(
            {"steps": 8, "beta": 0.9},
            is_available=True,
            limits=(
                Limit(
                    lambda given, num_ranks: given["beta"] >= num_ranks,
                    "a force of beta / ranks = 1 or more throws a rank to the centre or beyond",
                    lambda _: {"beta": 0.9},
                ),
            ),
            traits=Traits(sends="weights", commit="arrival"),
            realised_by={"all_reduce": f"{_SCHEMES}.elastic:make_elastic", "servers": f"{_POLICIES}:asynchronous"},
            equations={
                "all_reduce": f"{_EQUATIONS}:ElasticEquations",
                "servers": "weft.proving.elastic_equations:follow_centre",
            },
            cost=f"{_COSTS}:elastic",
        ),
        "gossip": Value(
            {"graph": "ring", "mix": "during", "lost": "end"},
            is_available=True,
            words={
                "graph": ("ring", "torus", "exponential", "complete"),
                "mix": ("during", "after", "pair"),
                "lost": ("end", "drop"),
            },
            limits=(
                Limit(
                    lambda given, _: given["lost"] == "drop" and given["mix"] == "after",
                    "ranks that may die send their weights before the gradient, and mix what has come",
                    lambda _: {"mix": "during"},
                ),
            ),
            traits=Traits(sends="weights"),
            realised_by={
                "all_reduce": f"{_SCHEMES}.gossip:make_gossip",
                "neighbours": "weft.distributed.channels.neighbours:use_neighbours",
            },
            neighbours_if={"mix": "pair", "lost": "drop"},
            equations={"all_reduce": f"{_EQUATIONS}:GossipEquations"},
            cost=f"{_COSTS}:gossip",
        ),
    },
    "topology": {
        "native": Value(is_available=True, rounds_once=True, cost=f"{_COLLECTIVES}:ring"),
        "auto": Value(is_available=True, cost=f"{_COLLECTIVES}:ring"),
        "direct": Value(is_available=True, rounds_once=True, cost=f"{_COLLECTIVES}:ring"),
        "ring": Value(is_available=True, cost=f"{_COLLECTIVES}:ring"),
        "tree": Value(is_available=True, cost=f"{_COLLECTIVES}:tree"),
        "halving_doubling": Value(is_available=True, cost=f"{_COLLECTIVES}:halving_doubling"),
        "hierarchical": Value(
            {"inner": 2, "by": "ring"},
            is_available=True,
            words={"by": ("ring", "halving")},
            cost=f"{_COLLECTIVES}:hierarchical",
        ),
        "server": Value(
            {"shards": 1, "place": "shared", "inner": 1},
            is_available=True,
            words={"place": ("shared", "own")},
            rounds_once=True,
        ),
        "neighbours": Value({"graph": "ring"}),
    },
    "compress": {
        "none": _codec("exact:make_exact", "EXACT", "none"),
        "fp16": _codec("half:make_fp16", "FP16", "half"),
        "bf16": _codec("half:make_bf16", "BF16", "half"),
        "qsgd": Value({"bits": 8}),
        "terngrad": Value(),
        "onebit": Value(),
        "topk": Value({"ratio": 0.01}),
        "dgc": Value({"ratio": 0.001}),
        "powersgd": Value({"rank": 4}),
        "sparse": Value({"ratio": 0.01}),
        "factors": Value(),
    },
}

DEGREES: Mapping[str, str] = {
    "data": "copies of the model, each with a share of the batch",
    "shard": "copies of the model that hold its optimizer state together; by shard_level gradients and parameters too",
    "tensor": "ranks that split every layer; one number for each stage where they differ, such as 1:2",
    "pipeline": "stages: each rank has some of the layers",
    "expert": "copies of the model that split its experts among them",
    "linear": "copies of the model that split its linear layers among them, and no others",
}
"""The placement axis: kinds of split, each in a number of ways."""
