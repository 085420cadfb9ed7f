"""A plan's axes are asked for traits, never for the name of a value: so a new value is its file and one row."""

import ast
from collections.abc import Collection
from pathlib import Path

import pytest

from weft.specs.axes import AXES

SOURCE = Path(__file__).parents[2] / "weft"
MAY_ASK = {"weft/specs", "weft/planning/plan_cost.py", "weft/distributed/place/topology.py"}
"""The table itself; the costs and the algorithms of topologies, which are named after them."""


def find_asked_names(source: Path, may_ask: Collection[str] = ()) -> list[str]:
    """Where a name of an axis's value is read: `plan.consistency.name`, `choice.name`."""
    offenders = []
    for file in sorted(source.rglob("*.py")):
        where = file.relative_to(source.parent).as_posix()
        if any(where == one or where.startswith(f"{one}/") for one in may_ask):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "name" and _last_word(node.value) in {*AXES, "choice"}:
                offenders.append(f"{where}:{node.lineno} asks for {ast.unparse(node)}")
    return offenders


def _last_word(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_nobody_asks_which_value_an_axis_has() -> None:
    assert find_asked_names(SOURCE, MAY_ASK) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(plan): return plan.consistency.name == 'sync'",
        "def f(recipe): return recipe.mutable.plan.topology.name in ('ring', 'tree')",
        "def f(plan):\n    choice = plan.compress\n    return {'none': 1}[choice.name]",
        "def f(plan):\n    match plan.consistency.name:\n        case 'sync': return 1",
    ],
)
def test_a_question_for_a_name_is_found(tmp_path: Path, text: str) -> None:
    for file in ("pkg/high/a.py", "pkg/low/a.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    (offender,) = find_asked_names(tmp_path / "pkg", {"pkg/low"})
    assert offender.startswith("pkg/high/a.py:")


def test_a_trait_and_a_parameter_may_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("def f(plan): return plan.is_synchronous or plan.consistency['steps'] == 1")
    assert find_asked_names(tmp_path / "pkg") == []
