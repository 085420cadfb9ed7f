"""A plan: one point in the space of parallel training, with its short text form.

    data=4 consistency=stale(3) topology=server(shards=2) compress=topk(0.01)
    ------ ------------------- ------------------------- -------------------
    what is   when replicas       who talks to whom        what is sent
    split     agree

The values of an axis and their parameters are rows of a table, and so are the combinations that are refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.errors import PlanError, nearest

__all__ = ["AXES", "DEGREES", "REFUSALS", "Choice", "Plan", "Refusal", "Value", "check_plan", "parse_plan"]

Number = int | float | str


@dataclass(frozen=True)
class Value:
    """One value that an axis can take: its parameters with their defaults, and whether this version has it."""

    parameters: Mapping[str, Number] = field(default_factory=dict)
    is_available: bool = False


AXES: Mapping[str, Mapping[str, Value]] = {
    "consistency": {
        "sync": Value(is_available=True),
        "backup": Value({"workers": 1}),
        "stale": Value({"bound": 3}),
        "async": Value(),
        "local": Value({"steps": 8}),
        "elastic": Value({"steps": 8}),
        "gossip": Value({"graph": "ring"}),
    },
    "topology": {
        "native": Value(is_available=True),
        "auto": Value(is_available=True),
        "ring": Value(is_available=True),
        "tree": Value(is_available=True),
        "halving_doubling": Value(is_available=True),
        "hierarchical": Value({"inner": 2}, is_available=True),
        "server": Value({"shards": 1}, is_available=True),
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


@dataclass(frozen=True)
class Choice:
    """A value of an axis with its parameters: `server(shards=2)`."""

    name: str
    parameters: tuple[tuple[str, Number], ...] = ()

    def __getitem__(self, parameter: str) -> Number:
        return dict(self.parameters)[parameter]

    def __str__(self) -> str:
        inside = ",".join(f"{key}={value}" for key, value in self.parameters)
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Plan:
    """Four independent axes. `str(plan)` is the short text that `parse_plan` reads.

    >>> str(parse_plan("data=4 topology=server(2)"))
    'data=4 topology=server(shards=2)'
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    consistency: Choice = Choice("sync")
    topology: Choice = Choice("native")
    compress: Choice = Choice("none")

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = Plan.__dataclass_fields__
        shown = {k: v for k, v in values.items() if k == "data" or v != defaults[k].default}
        return " ".join(f"{key}={value}" for key, value in shown.items())


@dataclass(frozen=True)
class Refusal:
    """A combination that makes no sense: why, and the nearest plan that does."""

    applies: Callable[[Plan], bool]
    reason: str
    cure: Callable[[Plan], Plan]


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        lambda plan: plan.topology.name == "server" and int(plan.topology["shards"]) > plan.num_ranks,
        "more server shards than ranks to hold them",
        lambda plan: replace(plan, topology=Choice("server", (("shards", plan.num_ranks),))),
    ),
    Refusal(
        lambda plan: plan.topology.name == "hierarchical" and plan.num_ranks % int(plan.topology["inner"]) != 0,
        "ranks cannot be cut into inner groups of this size",
        lambda plan: replace(plan, topology=Choice("ring")),
    ),
)


def parse_plan(text: str) -> Plan:
    """The plan that a text means; refused, with the reason and the nearest valid plan, if there is no such thing.

    Raises:
        PlanError: an unknown key, value or parameter, one that this version does not have, or an invalid combination.
    """
    settings: dict[str, Any] = {}
    for word in re.findall(r"[^\s()]+(?:\([^)]*\))?", text):
        key, separator, value = word.partition("=")
        if not separator or key not in (*DEGREES, *AXES):
            raise PlanError(f"unknown word in a plan ({word}); {nearest(key, (*DEGREES, *AXES))}")
        if key in settings:
            raise PlanError(f"key is given twice in a plan ({key}); keep one")
        settings[key] = _parse_degree(key, value) if key in DEGREES else _parse_choice(key, value)
    plan = Plan(**settings)
    check_plan(plan)
    return plan


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


def _parse_degree(key: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"number of ways must be a whole number from 1 up ({key}: {text}); write {key}=2")
    return int(text)


def _parse_choice(key: str, text: str) -> Choice:
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    name = match[1] if match else text
    if not match or name not in AXES[key]:
        raise PlanError(f"unknown value in a plan ({key}: {text}); {nearest(name, AXES[key])}")
    defaults = dict(AXES[key][name].parameters)
    given = [part.strip() for part in (match[2] or "").split(",") if part.strip()]
    if len(given) > len(defaults):
        raise PlanError(f"too many parameters in a plan ({key}: {text}); it takes {list(defaults) or 'none'}")
    values = dict(defaults)
    for position, part in zip(defaults, given, strict=False):
        parameter, separator, value = part.rpartition("=")
        parameter = parameter if separator else position
        if parameter not in defaults:
            raise PlanError(f"unknown parameter in a plan ({key}: {text}); {nearest(parameter, defaults)}")
        values[parameter] = _parse_number(value, defaults[parameter], f"{key}: {text}")
    return Choice(name, tuple(values.items()))


def _parse_number(text: str, default: Number, where: str) -> Number:
    """The text as the type of the default; numbers must be above zero."""
    if isinstance(default, str):
        return text
    try:
        value = type(default)(text)
    except ValueError:
        raise PlanError(f"parameter of the wrong type ({where}); write a number like {default}") from None
    if value <= 0:
        raise PlanError(f"parameter must be above zero ({where}); write a number like {default}")
    return value
