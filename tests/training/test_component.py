"""Building blocks as data: options, settings as text, import paths, and every wrong use of them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from weft.errors import RecipeError
from weft.training.component import Component, build, check_options, coerce, find_by_path, options_of, parse_option


def net(
    given: str, *, width: int, depth: int = 2, rate: float = 0.5, kind: Literal["flat", "deep"] = "flat"
) -> tuple[Any, ...]:
    return given, width, depth, rate, kind


CATALOGUE: dict[str, Callable[..., Any]] = {"net": net, "bare": lambda given: given}


@pytest.fixture(autouse=True)
def fresh_user_modules() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith(("weft_user_", "planted_"))]:
        del sys.modules[name]


def write_module(folder: Path, text: str, name: str = "models.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_component_is_a_value() -> None:
    one = Component("net", width=3, hidden=(1, (2, 3)))
    two = Component.from_dict({"name": "net", "options": {"hidden": [1, [2, 3]], "width": 3}})
    assert one == two and hash(one) == hash(two)
    assert one != Component("net", width=4) != one.with_option("width", 4)
    assert one.with_option("width", 4) == Component("net", hidden=(1, (2, 3)), width=4)
    assert str(one) == "net(hidden=(1, (2, 3)), width=3)" and str(Component("net")) == "net"


def test_component_through_json() -> None:
    component = Component("net", width=3, rate=0.25, wide=True, nothing=None, hidden=(1, (2, 3)), name="x")
    assert Component.from_dict(json.loads(json.dumps(component.to_dict()))) == component


@pytest.mark.parametrize("value", [{1: 2}, {1}, b"x", 1j, object, float("inf"), float("nan"), (1, {2})], ids=repr)
def test_option_that_json_cannot_hold(value: Any) -> None:
    with pytest.raises(RecipeError, match="cannot be written as JSON"):
        Component("net", width=value)


def test_build_gives_what_is_given_and_the_options() -> None:
    assert build(Component("net", width=3, rate=1), CATALOGUE, "model", "spec") == ("spec", 3, 2, 1.0, "flat")
    assert list(options_of(net)) == ["width", "depth", "rate", "kind"]


@pytest.mark.parametrize(
    ("component", "text"),
    [
        (Component("nett"), r"unknown model \(nett\); did you mean 'net'\?"),
        (Component("qqq"), r"unknown model \(qqq\); known: bare, net"),
        (Component("net", widht=3), r"unknown option of model 'net' \(widht\); did you mean 'width'\?"),
        (Component("bare", width=3), r"unknown option of model 'bare' \(width\); it takes none"),
        (Component("net"), r"model 'net' lacks an option \(width\); --set model.width=\.\.\."),
        (Component("net", width=2.5), r"wrong type \(model.width: 2.5, wanted: int\); --set model.width=<int>"),
        (Component("net", width=True), r"wrong type \(model.width: True, wanted: int\)"),
        (Component("net", width="wide"), r"wrong type \(model.width: 'wide', wanted: int\)"),
        (Component("net", width=1, kind="deeep"), r"unknown value \(model.kind: 'deeep'\); did you mean 'deep'\?"),
    ],
    ids=str,
)
def test_wrong_component(component: Component, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        check_options(component, CATALOGUE, "model")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1e-3", 0.001),
        ("True", True),
        ("false", False),
        ("none", None),
        ("64,32", (64, 32)),
        ("64,", (64,)),
        ("[1, [2]]", (1, (2,))),
        ("'3'", "3"),
        ("adam", "adam"),
        ("a,b", "a,b"),
        ("data=1", "data=1"),
        ("", ""),
        ("models.py:net", "models.py:net"),
        ("{[]: 1}", "{[]: 1}"),
        ("1/2", "1/2"),
    ],
)
def test_text_of_a_setting(text: str, value: Any) -> None:
    found = parse_option(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["1e999", "{1: 2}", "b'x'", "2j"])
def test_text_that_is_no_option(text: str) -> None:
    with pytest.raises(RecipeError):
        parse_option(text)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (1, float, 1.0),
        (1, int | float, 1),
        (1, float | None, 1.0),
        (None, float | None, None),
        ("x", str | None, "x"),
        (64, tuple[int, ...], (64,)),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ("loss,accuracy", tuple[str, ...], ("loss", "accuracy")),
        ((), tuple[int, ...], ()),
        ((0.9, 1), tuple[float, float], (0.9, 1.0)),
        ((1, 2), tuple[int, ...] | None, (1, 2)),
        ("flat", Literal["flat", "deep"], "flat"),
        ({"any": 1}, Any, {"any": 1}),
    ],
    ids=str,
)
def test_value_that_fits(value: Any, annotation: Any, expected: Any) -> None:
    found = coerce(value, annotation, "key")
    assert found == expected and type(found) is type(expected)
    if isinstance(found, tuple):
        assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("x", float),
        (True, float),
        (True, int),
        (1, bool),
        (1, str),
        (None, int),
        (0.5, int | None),
        ("a", tuple[int, ...]),
        (0.9, tuple[float, float]),
        ((0.9, 0.99, 0.999), tuple[float, float]),
        (1, None.__class__),
    ],
    ids=str,
)
def test_value_that_does_not_fit(value: Any, annotation: Any) -> None:
    with pytest.raises(RecipeError, match=r"value of the wrong type \(lr: "):
        coerce(value, annotation, "lr")


def test_function_in_a_users_file(tmp_path: Path) -> None:
    path = write_module(
        tmp_path, "calls = []\ndef make(given, *, width: 'int'):\n    calls.append(1)\n    return given, width"
    )
    for width in (3, 4):
        assert build(Component(f"{path}:make", width=width), {}, "model", "spec") == ("spec", width)
    assert len(find_by_path(f"{path}:make").__globals__["calls"]) == 2  # the file was run once, not twice
    with pytest.raises(RecipeError, match="did you mean 'width'"):
        check_options(Component(f"{path}:make", witdh=1), {}, "model")


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        path = write_module(tmp_path / folder, f"def make():\n    return {value}")
        assert find_by_path(f"{path}:make")() == value


def test_function_in_an_installed_module() -> None:
    assert find_by_path("math:sqrt")(4) == 2
    assert find_by_path("os.path:join")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("absent.py:make", r"no such file \(absent.py\)"),
        ("weft_absent:make", r"no such module \(weft_absent\)"),
        ("weft.absent:make", r"no such module \(weft.absent\)"),
        (":make", "not the name of a module"),
        (".relative:make", "not the name of a module"),
        ("my models:make", "not the name of a module"),
        ("math:sqroot", r"no such function in math \(sqroot\); did you mean 'sqrt'"),
        ("math:pi", r"no such function in math \(pi\)"),
        ("math:", r"no such function in math \(\)"),
    ],
)
def test_wrong_import_path(path: str, text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        find_by_path(path)


def test_module_that_imports_a_missing_one_names_the_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, "import weft_absent", "planted_module.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RecipeError, match=r"no such module \(weft_absent\)"):
        find_by_path("planted_module:make")


def test_file_that_fails_is_tried_again(tmp_path: Path) -> None:
    path = write_module(tmp_path, "1 / 0")
    with pytest.raises(ZeroDivisionError):
        find_by_path(f"{path}:make")
    write_module(tmp_path, "make = dict  # now longer, so that no cached bytecode of the first is used")
    assert find_by_path(f"{path}:make") is dict
