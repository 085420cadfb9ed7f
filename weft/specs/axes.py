"""The axes of a plan: the values of each, with their parameters, as rows of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["AXES", "DEGREES", "Number", "Value"]

Number = int | float | str


@dataclass(frozen=True)
class Value:
    """One value that an axis can take: its parameters with their defaults, and whether this version has it.

    `words` lists what a parameter that is a word may say; `least` is the smallest value of a number that may be zero;
    `unbounded` names the whole numbers that may be `inf`.
    """

    parameters: Mapping[str, Number] = field(default_factory=dict)
    is_available: bool = False
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: Mapping[str, Number] = field(default_factory=dict)
    unbounded: tuple[str, ...] = ()


AXES: Mapping[str, Mapping[str, Value]] = {
    "consistency": {
        "sync": Value(is_available=True),
        "backup": Value({"workers": 1, "deadline": "none"}, is_available=True, least={"workers": 0}),
        "stale": Value(
            {"bound": 3, "commit": "clock", "lr": "share"},
            is_available=True,
            words={"commit": ("clock", "arrival"), "lr": ("share", "staleness", "full")},
            least={"bound": 0},
            unbounded=("bound",),
        ),
        "async": Value(
            {"lr": "share", "push": "gradient", "parts": 1},
            is_available=True,
            words={"lr": ("share", "staleness", "full"), "push": ("gradient", "difference")},
        ),
        "local": Value(
            {"steps": 8, "state": "keep", "after": 0, "outer": "none", "outer_lr": 0.7, "outer_momentum": 0.9},
            is_available=True,
            words={"state": ("keep", "mean"), "outer": ("none", "nesterov")},
        ),
        "elastic": Value({"steps": 8, "beta": 0.9}, is_available=True),
        "gossip": Value(
            {"graph": "ring", "mix": "during", "lost": "end"},
            is_available=True,
            words={
                "graph": ("ring", "torus", "exponential", "complete"),
                "mix": ("during", "after", "pair"),
                "lost": ("end", "drop"),
            },
        ),
    },
    "topology": {
        "native": Value(is_available=True),
        "auto": Value(is_available=True),
        "direct": Value(is_available=True),
        "ring": Value(is_available=True),
        "tree": Value(is_available=True),
        "halving_doubling": Value(is_available=True),
        "hierarchical": Value({"inner": 2}, is_available=True),
        "server": Value(
            {"shards": 1, "place": "shared", "inner": 1}, is_available=True, words={"place": ("shared", "own")}
        ),
        "neighbours": Value({"graph": "ring"}),
    },
    "compress": {
        "none": Value(is_available=True),
        "fp16": Value(),
        "bf16": Value(),
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
