"""From a plan's text to the plan."""

import math
import re
from typing import Any

from weft.errors import PlanError, nearest
from weft.specs.axes import AXES, DEGREES, Number, Value
from weft.specs.plan import Choice, Plan
from weft.specs.refusals import check_plan

__all__ = ["as_plan", "parse_plan", "parse_plan_for"]


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
        settings[key] = _parse_ways(key, value) if key in DEGREES else _parse_choice(key, value)
    plan = Plan(**settings)
    check_plan(plan)
    return plan


def as_plan(plan: Plan | str) -> Plan:
    """The plan itself or the one that a text means, with every parameter filled in; refused as `parse_plan` refuses.

    >>> as_plan(Plan(data=2, consistency=Choice("local"))).consistency["steps"]
    8
    """
    return parse_plan(str(plan))


def parse_plan_for(plan: Plan | str, num_ranks: int) -> Plan:
    """A plan, in which a degree without a number stands for all ranks.

    >>> str(parse_plan_for("data topology=ring", 4))
    'data=4 topology=ring'
    """
    return as_plan(" ".join(f"{word}={num_ranks}" if word in DEGREES else word for word in str(plan).split()))


def _parse_ways(key: str, text: str) -> int | tuple[int, ...]:
    """A number of ways, or of `tensor` one for each stage: 1:2."""
    ways = tuple(_parse_degree(key, part) for part in text.split(":")) if key == "tensor" else ()
    if len(ways) < 2:
        return _parse_degree(key, text)
    return ways if len(set(ways)) > 1 else ways[0]


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
        bounds = "above zero" if least is None else f"{least} or more"
        raise PlanError(f"parameter must be {bounds} ({where}); write a number like {default}")
    return value
