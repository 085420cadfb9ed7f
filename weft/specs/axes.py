"""The axes of a plan: the values of each, with their parameters, as rows of a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.specs.roles import Channel

__all__ = ["AXES", "DEGREES", "Coding", "Limit", "Number", "Sends", "Traits", "Value"]

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
class Coding:
    """The properties of a compression that others ask for.

    Args:
        takes_momentum: ranks keep the momentum of their gradients themselves.
        needs_matrices: whole matrices are sent in another form.
        carries_weights: a message stands for itself, so that weights can be sent; else changes alone.
        makes_estimates: whether with these parameters every message of a change brings an estimate of weights nearer,
            and is as long as the one before. Chance adds more than that with few levels.
        needs_group: what is sent hangs on a group in which ranks meet in every step.
    """

    takes_momentum: bool = False
    needs_matrices: bool = False
    carries_weights: bool = False
    makes_estimates: Callable[[Sequence[tuple[str, Number]]], bool] = lambda _: False
    needs_group: bool = False


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
    and `equations` the rounding that proofs hold it to, or a function of a setting (weft/proving/compression) that
    returns the compression of all ranks. Of a topology, `rounds_once` says that sums are made in the
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
    coding: Coding = Coding()
    cost: str = ""


def _is_deadline(text: str) -> bool:
    try:
        return text in ("none", "adaptive") or 0 < float(text) < math.inf
    except ValueError:
        return False


def _is_share(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


_SCHEMES, _POLICIES = "weft.distributed.consistency", "weft.distributed.consistency.server.policies"
_EQUATIONS, _FOLLOW_GRADIENTS = "weft.proving.relaxed_equations", "weft.proving.served:follow_recipe"
_COSTS, _COLLECTIVES = "weft.planning.plan_cost", "weft.planning.collective_cost"


def _codec(
    made_by: str, equations: str, cost: str, parameters: Mapping[str, Number] | None = None, **more: Any
) -> Value:
    """A codec that every channel can carry, unless `channels` names some."""
    channels: tuple[Channel, ...] = more.pop("channels", ("all_reduce", "servers", "neighbours"))
    return Value(
        parameters or {},
        is_available=True,
        realised_by=dict.fromkeys(channels, f"weft.distributed.codecs.{made_by}"),
        equations=dict.fromkeys(channels, f"weft.proving.{equations}"),
        cost=f"weft.planning.codec_cost:{cost}",
        **more,
    )


def _between(low: float, high: float, *names: str) -> Limit:
    """Numbers above `low`, and up to `high`."""
    return Limit(
        lambda given, _: any(not low < float(given[name]) <= high for name in names),
        f"a number above {low:g} and up to {high:g} is needed ({', '.join(names)})",
        lambda _: dict.fromkeys(names, high),
    )


def _finite(name: str, usual: float) -> Limit:
    return Limit(
        lambda given, _: not math.isfinite(float(given[name])),
        f"a finite number is needed ({name})",
        lambda _: {name: usual},
    )


_RATIO = _between(0, 1, "ratio")
_SUM: Mapping[str, Number] = {"sum": "auto", "bits": 0}
_SUMS = {"sum": ("auto", "fastest", "gather", "doubling", "split", "dense")}
_SUM_BITS = Limit(
    lambda given, _: given["bits"] not in (0, 2, 4, 8) or (given["bits"] and given["sum"] not in ("auto", "dense")),
    "a sum that is gathered dense may be sent in codes of 2, 4 or 8 bits; other sums have no such codes",
    lambda _: {"bits": 4, "sum": "dense"},
)


def _wire_format(made_by: str, cost: str, rounding: str) -> Value:
    """A form in which activations travel, made by a function of (choice); `cost` is one of (num_elements,
    element_bytes) that returns the bytes of a message, `equations` the largest error of a number, as a share of the
    largest of its tensor."""
    return Value(
        is_available=True,
        realised_by={"all_reduce": f"weft.distributed.codecs.activations.wire_format:{made_by}"},
        equations={"all_reduce": f"weft.proving.rounding:{rounding}"},
        cost=f"weft.planning.activation_cost:{cost}",
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


_OF_WEIGHTS, _OF_ESTIMATES = Coding(carries_weights=True), Coding(makes_estimates=lambda _: True)
_ROUNDING = {"round": ("nearest", "stochastic")}

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
    "activations": {
        "none": _wire_format("make_exact", "exact", "NO_STEP"),
        "fp16": _wire_format("make_fp16", "half", "FP16_STEP"),
        "bf16": _wire_format("make_bf16", "half", "BF16_STEP"),
        "linear8": _wire_format("make_linear8", "eight_bit", "LINEAR8_STEP"),
        "tree8": _wire_format("make_tree8", "eight_bit", "TREE8_STEP"),
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
            {"graph": "ring", "mix": "during", "lost": "end", "gamma": "auto"},
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
                Limit(
                    lambda given, _: given["gamma"] != "auto" and not _is_share(str(given["gamma"])),
                    "gamma is auto, or a number above 0 and up to 1",
                    lambda _: {"gamma": "auto"},
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
        "none": _codec("exact:make_exact", "rounding:EXACT", "none", coding=_OF_WEIGHTS),
        "fp16": _codec(
            "half:make_fp16", "rounding:FP16", "half", {"round": "nearest"}, words=_ROUNDING, coding=_OF_WEIGHTS
        ),
        "bf16": _codec(
            "half:make_bf16", "rounding:BF16", "half", {"round": "nearest"}, words=_ROUNDING, coding=_OF_WEIGHTS
        ),
        "qsgd": _codec(
            "qsgd:make_qsgd",
            "compression.schemes:qsgd",
            "quantised",
            {"bits": 8, "block": 512, "norm": "max"},
            words={"norm": ("l2", "max")},
            coding=Coding(makes_estimates=lambda given: ("bits", 8) in given),
            limits=(
                Limit(
                    lambda given, _: given["bits"] not in (2, 4, 8),
                    "codes of 2, 4 or 8 bits fill bytes",
                    lambda _: {"bits": 4},
                ),
            ),
        ),
        "terngrad": _codec(
            "terngrad:make_terngrad", "compression.schemes:terngrad", "ternary", {"clip": 2.5}, least={"clip": 0}
        ),
        "onebit": _codec(
            "signs:make_onebit", "compression.schemes:onebit", "signs", {"block": 4096}, coding=_OF_ESTIMATES
        ),
        "sign": _codec(
            "signs:make_sign", "compression.schemes:sign", "symmetric_signs", {"block": 4096}, coding=_OF_ESTIMATES
        ),
        "topk": _codec(
            "topk:make_topk",
            "compression.schemes:topk",
            "selected",
            {"ratio": 0.01, "select": "exact", **_SUM},
            words={"select": ("exact", "sampled"), **_SUMS},
            least={"bits": 0},
            limits=(_RATIO, _SUM_BITS),
            coding=Coding(makes_estimates=lambda given: ("select", "exact") in given),
        ),
        "threshold": _codec(
            "topk:make_threshold",
            "compression.schemes:threshold",
            "above",
            {"value": 0.001},
            limits=(_finite("value", 0.001),),
        ),
        "randomk": _codec(
            "randomk:make_randomk",
            "compression.schemes:randomk",
            "drawn",
            {"ratio": 0.01},
            limits=(_RATIO,),
            channels=("all_reduce",),
        ),
        "dgc": _codec(
            "dgc:make_dgc",
            "compression.schemes:dgc",
            "selected",
            {"ratio": 0.001, "warmup": 100, "clip": 0.0, **_SUM},
            words=_SUMS,
            least={"warmup": 0, "clip": 0, "bits": 0},
            limits=(_RATIO, _SUM_BITS),
            channels=("all_reduce",),
            coding=Coding(takes_momentum=True),
        ),
        "powersgd": _codec(
            "powersgd:make_powersgd",
            "compression.schemes:powersgd",
            "factored",
            {"rank": 4},
            channels=("all_reduce",),
            coding=Coding(needs_matrices=True),
        ),
        "auto": _codec(
            "auto:make_auto",
            "compression.schemes:topk",
            "selected",
            {"ratio": 0.01},
            limits=(_RATIO,),
            channels=("all_reduce",),
            coding=Coding(needs_group=True),
        ),
        "factors": Value(
            is_available=True,
            realised_by={"all_reduce": "weft.distributed.codecs.exact:make_exact"},  # of all that are no factors
            equations={"all_reduce": "weft.proving.rounding:EXACT"},
            cost="weft.planning.codec_cost:factors",
        ),
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
