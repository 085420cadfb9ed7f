"""A recipe: what is trained (fixed), how (mutable), and what the result must be (rules)."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_type_hints

from weft.errors import RecipeError, nearest
from weft.metrics.metric import Rule
from weft.specs import Plan, as_plan
from weft.training.component import Component, coerce, parse_option

__all__ = ["Fixed", "Mutable", "Recipe"]

Part = TypeVar("Part", "Fixed", "Mutable")


@dataclass(frozen=True)
class Fixed:
    """The problem itself, by which results are comparable: runs whose fixed parts differ are not the same problem."""

    model: Component
    data: Component
    loss: Component
    epochs: float
    metrics: tuple[str, ...] = ()  # what an evaluation computes besides the loss
    target: Rule | None = None  # on the validation split; training stops when it is met
    evaluate_every: float = 1.0  # in epochs

    def __post_init__(self) -> None:
        _coerce_fields(self)


@dataclass(frozen=True)
class Mutable:
    """The settings that may be tuned. The batch size is global: that of all ranks together."""

    batch_size: int
    optimizer: Component
    schedule: Component = field(default_factory=lambda: Component("constant"))
    sampler: Component = field(default_factory=lambda: Component("shuffled"))
    executor: Component = field(default_factory=lambda: Component("eager"))
    plan: Plan = field(default_factory=Plan)  # or its text
    device: str = "auto"  # the accelerator if there is one; or cpu, a kind (cuda), one device (cuda:1)
    init: str = ""  # weights to begin with: a .safetensors file or a folder of them; by default the model's own
    buffers: Literal["mean", "rank"] = "mean"  # running statistics before an evaluation: averaged, or each rank's own
    rules: tuple[tuple[str, str], ...] = ()  # globs of layers' names, and how such layers are split; or a mapping
    accumulate: int = 1  # micro-batches that a batch is cut into
    clip_norm: float | None = None  # of all gradients together
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        _coerce_fields(self)


@dataclass(frozen=True)
class Recipe:
    """One complete training. Built by the functions in `weft.recipes` or by a user's own."""

    name: str
    description: str
    fixed: Fixed
    mutable: Mutable
    rules: tuple[Rule, ...] = ()

    @property
    def fixed_hash(self) -> str:
        """SHA-256 of the fixed part; parts that are equal have one hash, as 1 and 1.0 are."""
        text = json.dumps(_canonical(_to_json(self.fixed)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return dict(_to_json(self))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Recipe":
        try:
            return Recipe(
                name=data["name"],
                description=data["description"],
                fixed=_part_from_json(Fixed, data["fixed"]),
                mutable=_part_from_json(Mutable, data["mutable"]),
                rules=tuple(Rule(**rule) for rule in data["rules"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise RecipeError(f"recipe is not whole ({error}); write it with Recipe.to_dict()") from error

    def with_setting(self, key: str, text: str) -> "Recipe":
        """The recipe with one value changed: `batch_size`, `optimizer` (a name) or `optimizer.lr` (an option)."""
        first, _, option = key.partition(".")
        for part_name in ("fixed", "mutable"):
            part = getattr(self, part_name)
            if first in {f.name for f in fields(part)}:
                value = _changed(part, first, option, text)
                return dataclasses.replace(self, **{part_name: dataclasses.replace(part, **{first: value})})
        known = [f.name for part in (Fixed, Mutable) for f in fields(part)]
        raise RecipeError(f"unknown key ({key}); {nearest(first, known)}")


def _changed(part: Fixed | Mutable, name: str, option: str, text: str) -> Any:
    """The new value of a field, from the text of a setting."""
    annotation, current = get_type_hints(type(part))[name], getattr(part, name)
    if name == "rules":
        return _ruled(current, option, text)
    if option and not isinstance(current, Component):
        raise RecipeError(f"key has no options ({name}.{option}); --set {name}={text}")
    if option:
        return current.with_option(option, parse_option(text))
    if isinstance(current, Component):
        return Component(text)
    if name == "target":
        return _target(current, text)
    if name == "plan":
        return as_plan(text)
    return coerce(parse_option(text), annotation, name)


def _ruled(current: tuple[tuple[str, str], ...], glob: str, word: str) -> tuple[tuple[str, str], ...]:
    """The rules with one more, before the others, or `none` of them."""
    if glob:
        return ((glob, word), *(rule for rule in current if rule[0] != glob))
    if parse_option(word) is not None:
        raise RecipeError(f"a rule is for layers with a name (rules: {word}); --set 'rules.classifier.*={word}'")
    return ()


def _target(current: Rule | None, text: str) -> Rule | None:
    """`none`, a new bound for the target that there is, or a metric and its bound: `accuracy:0.97`."""
    if parse_option(text) is None:
        return None
    metric, _, bound = text.rpartition(":")
    metric = metric or (current.metric if current else "")
    if not metric:
        raise RecipeError(f"recipe has no target whose bound could change (target: {text}); --set target=METRIC:BOUND")
    return Rule(metric, coerce(parse_option(bound), float, "target"))


def _coerce_fields(part: Fixed | Mutable) -> None:
    hints = get_type_hints(type(part))
    for name, value in vars(part).items():
        if name == "rules" and isinstance(value, Mapping):
            value = tuple(value.items())
        found = as_plan(value) if name == "plan" else coerce(value, hints[name], name)
        object.__setattr__(part, name, found)


def _canonical(value: Any) -> Any:
    """JSON in which equal numbers are written alike."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_json(value: Any) -> Any:
    if isinstance(value, Component):
        return value.to_dict()
    if isinstance(value, Plan):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: _to_json(getattr(value, f.name)) for f in fields(value)}
    return [_to_json(item) for item in value] if isinstance(value, tuple) else value


def _part_from_json(kind: type[Part], data: Mapping[str, Any]) -> Part:
    hints = get_type_hints(kind)
    unknown = set(data) - set(hints)
    if unknown:
        raise RecipeError(f"unknown key ({min(unknown)}); {nearest(min(unknown), hints)}")
    return kind(**{name: _value_from_json(hints[name], value) for name, value in data.items()})


def _value_from_json(annotation: Any, value: Any) -> Any:
    if annotation is Component:
        return Component.from_dict(value)
    if isinstance(value, Mapping):
        return Rule(**value)
    return tuple(value) if isinstance(value, list) else value
