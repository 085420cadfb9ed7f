"""A plan: one point in the space of parallel training, with its short text form.

    data=4 consistency=stale(3) topology=server(shards=2) compress=topk(0.01)
    ------ ------------------- ------------------------- -------------------
    what is   when replicas       who talks to whom        what is sent
    split     agree

The values of an axis and their parameters are rows of a table, and so are the combinations that are refused.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.errors import PlanError, nearest

__all__ = ["AXES", "DEGREES", "REFUSALS", "Choice", "Plan", "Refusal", "Value", "check_plan", "parse_plan"]

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

    @property
    def is_served(self) -> bool:
        """Whether ranks meet nobody but servers."""
        return self.consistency.name in ("async", "stale", "backup") or _is_served_centre(self)

    @property
    def is_paired(self) -> bool:
        """Whether ranks meet one neighbour at a time, each at its own pace."""
        return self.consistency.name == "gossip" and self.consistency["mix"] == "pair"

    @property
    def is_mailed(self) -> bool:
        """Whether ranks gossip over the mailbox, and go on without those that die."""
        return self.is_paired or (self.consistency.name == "gossip" and self.consistency["lost"] == "drop")

    @property
    def num_addresses(self) -> int:
        """Ranks, and those who answer beside them over the mailbox: servers, or a desk for every rank."""
        servers = int(self.topology["shards"]) + self.num_hosts if self.is_served else 0
        beside = self.num_ranks if self.is_mailed else servers
        return self.num_ranks + beside

    @property
    def num_processes(self) -> int:
        """Ranks, and the servers that are processes of their own; these come after the ranks."""
        return self.num_ranks + (int(self.topology["shards"]) + self.num_hosts if _has_own_servers(self) else 0)

    @property
    def num_hosts(self) -> int:
        """Host servers, each in front of the global ones for `inner` ranks, the last for those that are left."""
        return -(-self.num_ranks // _inner(self)) if _inner(self) > 1 else 0

    @property
    def roles(self) -> tuple[str, ...]:
        """What each process is for.

        >>> parse_plan("data=2 consistency=async topology=server(shards=1,place=own)").roles
        ('worker', 'worker', 'server 0')
        >>> parse_plan("data=2 consistency=async topology=server").roles
        ('worker, server 0', 'worker')
        >>> parse_plan("data=3 consistency=async topology=server(inner=2)").roles
        ('worker, server 0, host server 0', 'worker', 'worker, host server 1')
        """
        workers = ("worker",) * self.num_ranks
        if self.topology.name != "server":
            return workers
        servers = [f"server {shard}" for shard in range(int(self.topology["shards"]))]
        hosts = [f"host server {host}" for host in range(self.num_hosts)]
        if self.num_processes > self.num_ranks:
            return (*workers, *servers, *hosts)
        shared = {rank: [name] for rank, name in enumerate(servers)}
        for host, name in enumerate(hosts):
            shared.setdefault(host * _inner(self), []).append(name)
        return tuple(", ".join([role, *shared.get(rank, ())]) for rank, role in enumerate(workers))

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = Plan.__dataclass_fields__
        shown = {k: v for k, v in values.items() if k == "data" or v != defaults[k].default}
        return " ".join(f"{key}={_spell(key, value)}" for key, value in shown.items())


@dataclass(frozen=True)
class Refusal:
    """A combination that makes no sense: why, and the nearest plan that does."""

    applies: Callable[[Plan], bool]
    reason: str
    cure: Callable[[Plan], Plan]


def _with(choice: Choice, **parameters: Number) -> Choice:
    """The choice with other values for some of its parameters."""
    return replace(choice, parameters=tuple({**dict(choice.parameters), **parameters}.items()))


def _is_served_centre(plan: Plan) -> bool:
    """Whether elastic ranks find their centre at servers, each at its own pace, instead of in turns on rank 0."""
    return plan.consistency.name == "elastic" and plan.topology.name == "server"


def _is_relaxed(plan: Plan) -> bool:
    """Whether ranks train by themselves, and agree in a group."""
    return plan.consistency.name in ("local", "elastic", "gossip") and not _is_served_centre(plan)


def _meets_at_servers(plan: Plan) -> bool:
    return plan.is_served and plan.num_ranks > 1


def _has_own_servers(plan: Plan) -> bool:
    return dict(plan.topology.parameters).get("place") == "own"


def _inner(plan: Plan) -> int:
    """Ranks to a host server; 1 means none."""
    return int(dict(plan.topology.parameters).get("inner", 1)) if plan.topology.name == "server" else 1


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
        lambda plan: (_is_relaxed(plan) or plan.is_served) and plan.num_ranks == 1,
        "one rank has nobody to agree with",
        lambda plan: replace(plan, consistency=Choice("sync"), topology=Choice("native")),
    ),
    Refusal(
        lambda plan: _meets_at_servers(plan) and plan.topology.name != "server",
        "ranks of this consistency meet at servers",
        lambda plan: replace(plan, topology=_server(), compress=Choice("none")),
    ),
    Refusal(
        lambda plan: _meets_at_servers(plan) and plan.compress.name != "none",
        "servers take gradients and weights as they are",
        lambda plan: replace(plan, topology=_server(), compress=Choice("none")),
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
        lambda plan: (
            plan.consistency.name == "stale"
            and plan.consistency["commit"] == "clock"
            and plan.consistency["lr"] != "share"
        ),
        "the gradients of a clock are one update, with the learning rate as it is",
        lambda plan: replace(plan, consistency=_with(plan.consistency, commit="arrival")),
    ),
    Refusal(
        lambda plan: (
            plan.consistency.name == "stale"
            and plan.consistency["commit"] == "clock"
            and plan.consistency["bound"] == math.inf
        ),
        "without a bound no rank waits for the gradients that a clock commits together",
        lambda plan: replace(plan, consistency=_with(plan.consistency, commit="arrival")),
    ),
    Refusal(
        lambda plan: _has_own_servers(plan) and not plan.is_served,
        "servers of synchronous ranks are ranks themselves",
        lambda plan: replace(plan, topology=_with(plan.topology, place="shared")),
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
        lambda plan: plan.is_mailed and plan.consistency["mix"] == "after",
        "ranks that may die send their weights before the gradient, and mix what has come",
        lambda plan: replace(plan, consistency=_with(plan.consistency, mix="during")),
    ),
    Refusal(
        lambda plan: _is_relaxed(plan) and plan.compress.name != "none",
        "gradients are compressed, and this consistency sends weights",
        lambda plan: replace(plan, compress=Choice("none")),
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
        "a spring of beta / ranks = 1 or more throws a rank to the centre or beyond",
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
        lambda plan: _inner(plan) > 1 and plan.consistency.name != "async",
        "a host server joins gradients that are used as they arrive, and no others",
        lambda plan: replace(plan, topology=_with(plan.topology, inner=1)),
    ),
    Refusal(
        lambda plan: _inner(plan) > 1 and plan.consistency.name == "async" and int(plan.consistency["parts"]) > 1,
        "a host server reaches every shard with every push",
        lambda plan: replace(plan, consistency=_with(plan.consistency, parts=1)),
    ),
    Refusal(
        lambda plan: _inner(plan) > plan.num_ranks,
        "more ranks to a host server than there are",
        lambda plan: replace(plan, topology=_with(plan.topology, inner=plan.num_ranks)),
    ),
    Refusal(
        lambda plan: plan.topology.name == "hierarchical" and plan.num_ranks % int(plan.topology["inner"]) != 0,
        "ranks cannot be cut into inner groups of this size",
        lambda plan: replace(plan, topology=Choice("ring")),
    ),
)


def _spell(key: str, value: int | Choice) -> str:
    """A degree or a choice as short text: of the parameters the first, and those that are not as usual."""
    if isinstance(value, int):
        return str(value)
    defaults = AXES[key][value.name].parameters
    shown = [p for i, p in enumerate(value.parameters) if i == 0 or p[1] != defaults.get(p[0])]
    return str(replace(value, parameters=tuple(shown)))


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
        parameter = parameter.strip() if separator else position
        if parameter not in defaults:
            raise PlanError(f"unknown parameter in a plan ({key}: {text}); {nearest(parameter, defaults)}")
        values[parameter] = _parse_value(value.strip(), parameter, AXES[key][name], f"{key}: {text}")
    return Choice(name, tuple(values.items()))


def _parse_value(text: str, parameter: str, kind: Value, where: str) -> Number:
    """The text as the type of the default. A word must be one that is known, a number the default or above zero, or
    from the least on."""
    default, least = kind.parameters[parameter], kind.least.get(parameter)
    words = kind.words.get(parameter)
    if text == "inf" and parameter in kind.unbounded:
        return math.inf
    if words is not None and text not in words:
        raise PlanError(f"unknown word in a plan ({where}); {nearest(text, words)}")
    if isinstance(default, str):
        return text
    try:
        value = type(default)(text)
    except ValueError:
        raise PlanError(f"parameter of the wrong type ({where}); write a number like {default}") from None
    if not (value > 0 or value in (default, least)):  # not-a-number is neither
        raise PlanError(f"parameter must be above zero ({where}); write a number like {default}")
    return value
