"""The axes of a plan: the values of each, with their parameters, as rows of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.specs.roles import Channel

__all__ = ["AXES", "DEGREES", "Number", "Value"]

Number = int | float | str


@dataclass(frozen=True)
class Value:
    """One value that an axis can take: its parameters with their defaults, and whether this version has it.

    `words` lists what a parameter that is a word may say; `least` is the smallest value of a number that may be zero;
    `unbounded` names the whole numbers that may be `inf`. Of a consistency, `realised_by` is the import path of its
    implementation for each channel that it has: in a group of all ranks a function of (group, choice) that returns a
    scheme, at servers one of (choice, num_workers, is_fresh) that returns a policy. Synchronous ranks of a group need
    no scheme, and neighbours have a channel of their own: there the path says where to look, and is not called. `cost`
    is the import path of what the value costs, in weft/planning, where the arguments of each axis' functions are told.
    """

    parameters: Mapping[str, Number] = field(default_factory=dict)
    is_available: bool = False
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: Mapping[str, Number] = field(default_factory=dict)
    unbounded: tuple[str, ...] = ()
    realised_by: Mapping[Channel, str] = field(default_factory=dict)
    cost: str = ""


_SCHEMES, _POLICIES = "weft.distributed.consistency", "weft.distributed.consistency.server.policies"
_COSTS, _CODECS = "weft.planning.plan_cost", "weft.planning.codec_cost"
_COLLECTIVES = "weft.planning.collective_cost"

AXES: Mapping[str, Mapping[str, Value]] = {
    "consistency": {
        "sync": Value(
            is_available=True,
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
            realised_by={"servers": f"{_POLICIES}:backup"},
            cost=f"{_COSTS}:served",
        ),
        "stale": Value(
            {"bound": 3, "commit": "clock", "lr": "share"},
            is_available=True,
            words={"commit": ("clock", "arrival"), "lr": ("share", "staleness", "full")},
            least={"bound": 0},
            unbounded=("bound",),
            realised_by={"servers": f"{_POLICIES}:stale"},
            cost=f"{_COSTS}:served",
        ),
        "async": Value(
            {"lr": "share", "push": "gradient", "parts": 1},
            is_available=True,
            words={"lr": ("share", "staleness", "full"), "push": ("gradient", "difference")},
            realised_by={"servers": f"{_POLICIES}:asynchronous"},
            cost=f"{_COSTS}:served",
        ),
        "local": Value(
            {"steps": 8, "state": "keep", "after": 0, "outer": "none", "outer_lr": 0.7, "outer_momentum": 0.9},
            is_available=True,
            words={"state": ("keep", "mean"), "outer": ("none", "nesterov")},
            realised_by={"all_reduce": f"{_SCHEMES}.local:make_local"},
            cost=f"{_COSTS}:local",
        ),
        "elastic": Value(
            {"steps": 8, "beta": 0.9},
            is_available=True,
            realised_by={"all_reduce": f"{_SCHEMES}.elastic:make_elastic", "servers": f"{_POLICIES}:asynchronous"},
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
            realised_by={
                "all_reduce": f"{_SCHEMES}.gossip:make_gossip",
                "neighbours": "weft.distributed.channels.neighbours:use_neighbours",
            },
            cost=f"{_COSTS}:gossip",
        ),
    },
    "topology": {
        "native": Value(is_available=True, cost=f"{_COLLECTIVES}:ring"),
        "auto": Value(is_available=True, cost=f"{_COLLECTIVES}:ring"),
        "direct": Value(is_available=True, cost=f"{_COLLECTIVES}:ring"),
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
            {"shards": 1, "place": "shared", "inner": 1}, is_available=True, words={"place": ("shared", "own")}
        ),
        "neighbours": Value({"graph": "ring"}),
    },
    "compress": {
        "none": Value(is_available=True, cost=f"{_CODECS}:none"),
        "fp16": Value(cost=f"{_CODECS}:half"),
        "bf16": Value(cost=f"{_CODECS}:half"),
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

DEGREES: Mapping[str, bool] = {"data": True, "shard": False, "tensor": False, "pipeline": False}
"""The placement axis: how many ways each kind of split has, and whether this version has it."""
