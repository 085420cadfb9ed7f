"""The settings of a recorded recipe by the keys that `--set` takes, and how two runs differ in them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.records.record import RunRecord

__all__ = ["PARTS", "SettingDifference", "differences", "settings_of"]

PARTS = ("fixed", "mutable")
ABSENT = "-"


@dataclass(frozen=True)
class SettingDifference:
    """A setting that two runs do not share, as text."""

    part: str
    key: str
    a: str
    b: str


def settings_of(record: RunRecord, part: str) -> dict[str, str]:
    """The settings of one part: `optimizer` is a component's name, `optimizer.lr` one of its options."""
    return dict(_flatten(record.recipe.get(part, {})))


def differences(a: RunRecord, b: RunRecord) -> list[SettingDifference]:
    """Every setting that differs, those of the fixed part first."""
    found = []
    for part in PARTS:
        first, second = settings_of(a, part), settings_of(b, part)
        for key in dict.fromkeys([*first, *second]):
            difference = SettingDifference(part, key, first.get(key, ABSENT), second.get(key, ABSENT))
            if difference.a != difference.b:
                found.append(difference)
    return found


def _flatten(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value.keys() == {"name", "options"}:
            yield key, str(value["name"])
            yield from ((f"{key}.{option}", _text(chosen)) for option, chosen in value["options"].items())
        else:
            yield key, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(map(_text, value.values()))  # a rule: its metric and its bound
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
