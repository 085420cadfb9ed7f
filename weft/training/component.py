"""A named building block with its options, as data: what a recipe is made of.

A name is a key of a catalogue (`"mlp"`) or an import path (`"my_project.models:net"`, `"models.py:net"`), never a
closure, so that a recipe can be written as JSON and built again in another process.
"""

import ast
import importlib
import importlib.util
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import RecipeError, nearest

__all__ = ["Component", "Option", "build", "check_options", "coerce", "find_by_path", "options_of", "parse_option"]

Option = bool | int | float | str | None | tuple["Option", ...]
T = TypeVar("T")


@dataclass(frozen=True, init=False)
class Component:
    """`Component("mlp", hidden=(64, 64))`: hashable, serialisable, built by `build`."""

    name: str
    options: tuple[tuple[str, Option], ...]

    def __init__(self, name: str, /, **options: Option) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", tuple(sorted((k, _freeze(v)) for k, v in options.items())))

    def with_option(self, key: str, value: Option) -> "Component":
        return Component(self.name, **{**dict(self.options), key: value})

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "options": dict(self.options)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> "Component":
        return Component(data["name"], **data["options"])

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={value}" for key, value in self.options)
        return f"{self.name}({inside})" if inside else self.name


def build(component: Component, catalogue: Mapping[str, Callable[..., T]], kind: str, *given: Any) -> T:
    """Call the component's factory with `given` in front of its options."""
    factory = find_factory(component.name, catalogue, kind)
    return factory(*given, **check_options(component, catalogue, kind))


def check_options(component: Component, catalogue: Mapping[str, Callable[..., T]], kind: str) -> dict[str, Any]:
    """The options as the factory's signature wants them; an unknown, missing or ill-typed one is an error."""
    known = options_of(find_factory(component.name, catalogue, kind))
    options = {}
    for key, value in component.options:
        if key not in known:
            cure = nearest(key, known) if known else "it takes none (options are keyword-only parameters)"
            raise RecipeError(f"unknown option of {kind} {component.name!r} ({key}); {cure}")
        options[key] = coerce(value, known[key].annotation, f"{kind}.{key}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in options]
    if missing:
        raise RecipeError(f"{kind} {component.name!r} lacks an option ({missing[0]}); --set {kind}.{missing[0]}=...")
    return options


def find_factory(name: str, catalogue: Mapping[str, Callable[..., T]], kind: str) -> Callable[..., T]:
    if ":" in name:
        return typing.cast(Callable[..., T], find_by_path(name))
    if name not in catalogue:
        raise RecipeError(f"unknown {kind} ({name}); {nearest(name, catalogue)}")
    return catalogue[name]


def find_by_path(path: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` points to."""
    where, _, name = path.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise RecipeError(f"no such function in {where} ({name}); {nearest(name, functions)}")
    return typing.cast(Callable[..., Any], function)


def options_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a factory, with evaluated annotations: its options."""
    parameters = inspect.signature(factory, eval_str=True).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def parse_option(text: str) -> Option:
    """The value that `--set key=text` means: a Python literal, a comma-separated tuple, or else the text itself.

    >>> parse_option("0.1"), parse_option("64,32"), parse_option("adam"), parse_option("none")
    (0.1, (64, 32), 'adam', None)
    """
    named: dict[str, Option] = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text
    return _freeze(value)


def coerce(value: Any, annotation: Any, key: str) -> Any:
    """The value as the annotated type, where nothing is lost by it; else an error that names the key.

    >>> coerce(1, float, "lr"), coerce(64, tuple[int, ...], "hidden")
    (1.0, (64,))
    """
    if annotation in (inspect.Parameter.empty, Any):
        return value
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for choice in arguments:
            try:
                return coerce(value, choice, key)
            except RecipeError:
                continue
    elif origin is typing.Literal:
        if value in arguments:
            return value
        raise RecipeError(f"unknown value ({key}: {value!r}); {nearest(str(value), map(str, arguments))}")
    elif origin is tuple:
        words = value.split(",") if isinstance(value, str) else value
        items = [word for word in words if word != ""] if isinstance(words, (tuple, list)) else (words,)
        kinds = (arguments[0],) * len(items) if arguments[-1] is Ellipsis else arguments
        if len(items) == len(kinds):
            return tuple(coerce(item, kind, key) for item, kind in zip(items, kinds, strict=True))
    elif annotation is type(None):
        if value is None:
            return None
    elif annotation is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif isinstance(value, annotation) and not (isinstance(value, bool) and annotation is int):
        return value
    wanted = getattr(annotation, "__name__", str(annotation))
    raise RecipeError(f"value of the wrong type ({key}: {value!r}, wanted: {wanted}); --set {key}=<{wanted}>")


def _freeze(value: Any) -> Option:
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item) for item in value)
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise RecipeError(f"option of a type that cannot be written as JSON ({value!r}: {type(value).__name__})")


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise RecipeError(f"no such file ({path}); give the path from the current folder")
    name = f"weft_user_{path.stem}_{abs(hash(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_module(name: str) -> types.ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise RecipeError(f"not the name of a module ({name!r}); give module:name or path/to/file.py:name")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:  # it, or one that it imports
        missing = error.name or name
        raise RecipeError(f"no such module ({missing}); install it or give a file: path/to/file.py:name") from error
