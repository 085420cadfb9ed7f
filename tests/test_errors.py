"""The exception tree: its exit codes, its drawing, and the cure for a misspelt name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import errors
from weft.errors import UsageError, WeftError, nearest

CLASSES = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("UsageError", 2),
        ("RecipeError", 2),
        ("DataNotFoundError", 2),
        ("RunFolderError", 2),
        ("ComparisonError", 2),
        ("CorruptFileError", 2),
        ("TrainingError", 3),
        ("DivergedError", 3),
        ("StorageError", 3),
    ],
)
def test_exit_codes_are_those_of_the_command_line(name: str, exit_code: int) -> None:
    assert getattr(errors, name).exit_code == exit_code


def test_every_error_is_a_weft_error_and_every_usage_error_a_value_error() -> None:
    assert all(issubclass(kind, WeftError) for kind in CLASSES)
    assert all(issubclass(kind, ValueError) for kind in CLASSES if issubclass(kind, UsageError))


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, int] = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([| +-]*)(\w+Error)\b", line)
        if match:
            drawn[match[2]] = len(match[1]) // 4
    depth = {kind.__name__: sum(issubclass(base, WeftError) for base in kind.__mro__) - 1 for kind in CLASSES}
    assert drawn == depth


@pytest.mark.parametrize(
    ("name", "cure"),
    [("adm", "did you mean 'adam'?"), ("Adam", "did you mean 'adam'?"), ("qqq", "known: adam, momentum, sgd")],
)
def test_nearest(name: str, cure: str) -> None:
    assert nearest(name, ["sgd", "momentum", "adam"]) == cure


@given(st.lists(st.text("abcxyz_", min_size=1, max_size=8), min_size=1, max_size=8, unique=True), st.data())
def test_the_nearest_of_a_known_name_is_itself(names: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(names))
    assert nearest(name, names) == f"did you mean {name!r}?"
