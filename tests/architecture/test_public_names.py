"""What a package exposes, and how its modules begin. Each rule is shown to work on a tree with a fault planted."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "weft"
EMPTY_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}


def sort_key(name: str) -> tuple[int, list[str | int]]:
    """The order ruff keeps: constants, classes, the rest (one capital letter is a class); numbers by their size."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def declared_names(tree: ast.Module) -> list[str] | None:
    """The literal list in `__all__`, or None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def bound_names(tree: ast.Module) -> set[str]:
    """Names that the top level of a module imports, defines or assigns, or gives by __getattr__."""
    names: set[str] = set()
    typed = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    is_lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
    for node in [*tree.body, *(inner for block in typed if is_lazy for inner in block.body)]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}
    return names


def find_wrong_exports(source: Path) -> list[str]:
    """Packages whose `__all__` is not exactly what they expose, and modules that declare a name they lack."""
    offenders = []
    for file in sorted(source.rglob("*.py")):
        tree, where = ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(source.parent))
        declared = declared_names(tree)
        public = {name for name in bound_names(tree) if not name.startswith("_")}
        if declared is None:
            if file.name == "__init__.py" and public:
                offenders.append(f"{where} has no __all__")
            continue
        if declared != sorted(declared, key=sort_key):
            offenders.append(f"{where} has an __all__ that is not sorted")
        if len(declared) != len(set(declared)):
            offenders.append(f"{where} has a name twice in __all__")
        offenders += [
            f"{where} lacks {name}, which is in __all__" for name in sorted(set(declared) - bound_names(tree))
        ]
        if file.name == "__init__.py":
            offenders += [f"{where} exposes {name}, which is not in __all__" for name in sorted(public - set(declared))]
    return offenders


def find_missing_docstrings(source: Path) -> list[str]:
    """Modules that do not open with a line that names the thing."""
    files = sorted(source.rglob("*.py"))
    return [
        f"{file.relative_to(source.parent)} does not open with a docstring"
        for file in files
        if not (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "")
        .split("\n")[0]
        .endswith((".", ":"))
    ]


def find_whats(source: Path) -> list[str]:
    """Docstrings, those of attributes too, that begin with "What": they say what a thing is for, not what it is."""
    offenders = []
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            body = getattr(node, "body", None)
            texts = [n for n in body if isinstance(n, ast.Expr)] if isinstance(body, list) else []
            found = [n for n in texts if isinstance(n.value, ast.Constant) and str(n.value.value).startswith("What")]
            offenders += [f"{file.relative_to(source.parent)}:{n.lineno} begins with What" for n in found]
    return offenders


def find_unexplained(source: Path) -> list[str]:
    """Functions that a package exposes, of four parameters and more, whose docstring has no `Args:`. Those of the
    command line have help texts instead."""
    exposed: set[str] = set()
    for file in source.rglob("__init__.py"):
        exposed |= set(declared_names(ast.parse(file.read_text(encoding="utf-8"))) or ())
    offenders = []
    for file in sorted(source.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        public = exposed & set(declared_names(tree) or ()) if "cli" not in file.parts else set()
        for node in (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in public):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            text = ast.get_docstring(node) or ""
            if any(ast.unparse(one) == "overload" for one in node.decorator_list):
                continue
            if len(arguments) > 3 and "Args:" not in text and "arguments are those of" not in text:
                offenders.append(f"{file.relative_to(source.parent)}:{node.lineno} {node.name} has no Args")
    return offenders


def find_empty_names(source: Path) -> list[str]:
    """Files and folders whose name says nothing of what they hold."""
    paths = sorted(path for path in source.rglob("*") if path.suffix in ("", ".py") and path.name != "__pycache__")
    return [f"{path.relative_to(source.parent)} says nothing" for path in paths if path.stem.strip("_") in EMPTY_NAMES]


def plant(root: Path, path: str, text: str) -> Path:
    file = root / "pkg" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return root / "pkg"


def test_packages_expose_exactly_what_they_declare() -> None:
    assert find_wrong_exports(SOURCE) == []


def test_modules_open_with_a_docstring() -> None:
    assert find_missing_docstrings(SOURCE) == []


def test_no_docstring_begins_with_what() -> None:
    assert find_whats(SOURCE) == []


def test_public_functions_explain_their_arguments() -> None:
    assert find_unexplained(SOURCE) == []


def test_names_say_what_a_file_holds() -> None:
    assert find_empty_names(SOURCE) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("from pkg.a import b", "has no __all__"),
        ("from pkg.a import b, c\n__all__ = ['b']", "exposes c"),
        ("from pkg.a import b\n__all__ = ['b', 'c']", "lacks c"),
        ("from pkg.a import b, c\n__all__ = ['c', 'b']", "not sorted"),
        ("from pkg.a import b\n__all__ = ['b', 'b']", "twice"),
        ("import os\nfrom pkg.a import b\n__all__ = ['b']", "exposes os"),
        ("from pkg.a import b\nlimit: int = 3\n__all__ = ['b']", "exposes limit"),
        ("def b(): ...\nclass C: ...\n__all__ = ['b']", "exposes C"),
    ],
)
def test_a_package_that_exposes_something_else_is_found(tmp_path: Path, text: str, fault: str) -> None:
    (offender,) = find_wrong_exports(plant(tmp_path, "__init__.py", text))
    assert fault in offender and "pkg/__init__.py" in offender


@pytest.mark.parametrize(
    "text",
    [
        "",
        "from pkg.a import b as c\n__all__ = ['c']",
        "from pkg.a import b10, b9\n__all__ = ['b9', 'b10']",
        "import os as _os\nfrom pkg.a import B, LIMIT, f\n__all__ = ['LIMIT', 'B', 'f']",
    ],
)
def test_a_package_that_exposes_what_it_declares_is_right(tmp_path: Path, text: str) -> None:
    assert find_wrong_exports(plant(tmp_path, "__init__.py", text)) == []


def test_a_module_may_keep_names_to_itself_but_not_promise_what_it_lacks(tmp_path: Path) -> None:
    assert find_wrong_exports(plant(tmp_path, "a.py", "import os\nf = g = 1\n__all__ = ['f']")) == []
    assert find_wrong_exports(plant(tmp_path, "a.py", "__all__ = ['f']")) == ["pkg/a.py lacks f, which is in __all__"]


@pytest.mark.parametrize("text", ["", "x = 1", "# a comment", "x = 1\n'''Too late.'''", "'''no end'''"])
def test_a_module_without_an_opening_line_is_found(tmp_path: Path, text: str) -> None:
    assert find_missing_docstrings(plant(tmp_path, "a.py", text)) == ["pkg/a.py does not open with a docstring"]


@pytest.mark.parametrize(
    "text",
    [
        "'''What it is.'''",
        "class A:\n    '''What it is.'''",
        "def f():\n    x = 1\n    '''What it is.'''",
        "LIMIT = 1\n'''What it is.'''",
    ],
)
def test_a_docstring_that_begins_with_what_is_found(tmp_path: Path, text: str) -> None:
    assert len(find_whats(plant(tmp_path, "a.py", text))) == 1


@pytest.mark.parametrize(("text", "is_right"), [("", False), ("Args:\n    a: b.", True)])
def test_a_public_function_without_args_is_found(tmp_path: Path, text: str, is_right: bool) -> None:
    source = plant(tmp_path, "__init__.py", "from pkg.a import f\n__all__ = ['f']")
    plant(
        tmp_path,
        "a.py",
        f'__all__ = [\'f\', \'g\']\ndef f(a, b, *, c, d):\n    """F. {text}"""\ndef g(a, b, c, d): ...',
    )
    assert (find_unexplained(source) == []) is is_right


@pytest.mark.parametrize("path", ["utils.py", "a/utils.py", "utils/a.py", "_util.py", "deep/helpers.py", "common/x.py"])
def test_a_name_that_says_nothing_is_found(tmp_path: Path, path: str) -> None:
    assert len(find_empty_names(plant(tmp_path, path, ""))) == 1


def test_a_name_that_says_something_is_right(tmp_path: Path) -> None:
    assert find_empty_names(plant(tmp_path, "utilisation.py", "")) == []


def test_every_lazy_name_is_where_the_table_says() -> None:
    import weft

    for name in weft.__all__:
        assert getattr(weft, name) is not None
    assert dir(weft) == weft.__all__
    with pytest.raises(AttributeError, match="weave_all"):
        _ = weft.weave_all
