"""How long things are: printed where one should ask why, refused where there is no good answer."""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "weft"


@dataclass(frozen=True)
class Limit:
    """Above `ask` a size is printed, above `refuse` it fails the test."""

    ask: float
    refuse: float


LIMITS = {
    "file lines": Limit(400, 500),
    "function lines": Limit(60, 80),
    "class lines": Limit(300, 350),
    "class public methods": Limit(10, math.inf),  # a seam as wide as that of a group has its reasons
    "constructor arguments": Limit(8, 8),
}


@dataclass(frozen=True)
class Size:
    """One measured thing, such as the lines of a function."""

    where: str
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.where}: {self.number} {self.kind}"


def sizes_of(source: Path) -> Iterator[Size]:
    """Every size that has a limit, in every file."""
    for file in sorted(source.rglob("*.py")):
        text, where = file.read_text(encoding="utf-8"), str(file.relative_to(source.parent))
        yield Size(where, "file lines", len(text.splitlines()))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield Size(f"{where}:{node.lineno} {node.name}", "function lines", _num_lines(node))
                if node.name == "__init__":
                    yield Size(f"{where}:{node.lineno}", "constructor arguments", _num_arguments(node) - 1)
            elif isinstance(node, ast.ClassDef):
                yield Size(f"{where}:{node.lineno} {node.name}", "class lines", _num_lines(node))
                yield Size(f"{where}:{node.lineno} {node.name}", "class public methods", _num_public_methods(node))


def find_above(source: Path, what: str) -> list[str]:
    """The sizes above the limit `ask` or `refuse`, largest first."""
    sizes = [size for size in sizes_of(source) if size.number > getattr(LIMITS[size.kind], what)]
    return [str(size) for size in sorted(sizes, key=lambda size: -size.number)]


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _num_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def _num_public_methods(node: ast.ClassDef) -> int:
    functions = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return sum(not function.name.startswith("_") for function in functions)


def test_nothing_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    ask, refuse = find_above(SOURCE, "ask"), find_above(SOURCE, "refuse")
    if ask:
        with capsys.disabled():
            print("\nask why these are so long:", *ask, sep="\n  ")
    assert refuse == []


def lines(count: int) -> str:
    return "\n".join("    x = 1" for _ in range(count))


METHODS = "\n".join(f"    def m{i}(self): ...\n    def _m{i}(self): ..." for i in range(11))
ARGUMENTS = ", ".join(f"a{i}" for i in range(9))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x = 1\n" * 501, "pkg/a.py: 501 file lines"),
        (f"def f():\n{lines(80)}", "pkg/a.py:1 f: 81 function lines"),
        (f"async def f():\n{lines(80)}", "pkg/a.py:1 f: 81 function lines"),
        (f"class A:\n{lines(350)}", "pkg/a.py:1 A: 351 class lines"),
        (f"class A:\n    def __init__(self, {ARGUMENTS}): ...", "pkg/a.py:2: 9 constructor arguments"),
        (f"class A:\n    def __init__(self, *, {ARGUMENTS}): ...", "pkg/a.py:2: 9 constructor arguments"),
    ],
)
def test_what_is_too_long_is_found(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(text)
    assert find_above(tmp_path / "pkg", "refuse") == [fault]


def test_a_class_of_many_public_methods_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(f"class A:\n{METHODS}")
    assert find_above(tmp_path / "pkg", "refuse") == []
    assert find_above(tmp_path / "pkg", "ask") == ["pkg/a.py:1 A: 11 class public methods"]


def test_between_the_limits_one_only_asks(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(f"def f():\n{lines(60)}\ndef g():\n{lines(70)}\ndef h():\n{lines(59)}")
    assert find_above(tmp_path / "pkg", "refuse") == []
    assert find_above(tmp_path / "pkg", "ask") == [
        "pkg/a.py:62 g: 71 function lines",
        "pkg/a.py:1 f: 61 function lines",
    ]
