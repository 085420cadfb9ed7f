"""Who may import whom. Each rule is a function on a source tree, shown to work on one with a fault planted in it."""

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "weft"

BASE = {"atomic", "console", "errors", "script_lines", "secret", "specs", "torch_private"}
UP_TO_METRICS = BASE | {"records", "metrics"}
UP_TO_OPERATORS = UP_TO_METRICS | {"operators"}
UP_TO_GRAPH = UP_TO_OPERATORS | {"graph"}
UP_TO_TRAINING = UP_TO_GRAPH | {"training"}
UP_TO_DISTRIBUTED = UP_TO_TRAINING | {"planning", "distributed"}
UP_TO_ENGINES = UP_TO_DISTRIBUTED | {"engines"}
EVERYTHING = UP_TO_ENGINES | {"proving", "simulation", "recipes", "report", "runs"}

# Room (a folder or file of weft/) -> the rooms it may import. "weft" is weft/__init__.py. Nothing imports the cli.
ALLOWED: Mapping[str, set[str]] = {
    "errors": set(),
    "console": set(),
    "script_lines": set(),
    "torch_private": set(),
    "atomic": {"errors"},
    "secret": {"errors"},
    "specs": {"errors"},
    "records": BASE,
    "metrics": BASE | {"records"},
    "report": UP_TO_METRICS,
    "operators": UP_TO_METRICS,
    "graph": UP_TO_OPERATORS,
    "training": UP_TO_GRAPH,
    "recipes": UP_TO_TRAINING,
    "planning": UP_TO_GRAPH,
    "distributed": UP_TO_TRAINING | {"planning"},
    "engines": UP_TO_DISTRIBUTED,
    "proving": UP_TO_ENGINES,
    "simulation": UP_TO_ENGINES,
    "runs": UP_TO_ENGINES | {"recipes", "report"},
    "weft": EVERYTHING,
    "cli": EVERYTHING | {"weft"},
    "__main__": {"cli"},
}
MAY_IMPORT_TORCH_DISTRIBUTED = {"distributed", "engines"}

FILES = "its own files"


@dataclass(frozen=True)
class Import:
    """`importer` names `target` (a module, or a name in one) at a line, at the top or inside a function."""

    importer: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def modules_of(source: Path) -> dict[str, Path]:
    """Every module of a package folder by its dotted name; a package goes by the name of its folder."""
    names = {}
    for file in sorted(source.rglob("*.py")):
        parts = file.relative_to(source.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return names


def imports_of(module: str, file: Path) -> Iterator[Import]:
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (Import(module, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            yield from (Import(module, f"{base}.{alias.name}", node.lineno) for alias in node.names)


def all_imports(source: Path) -> list[Import]:
    return [found for module, file in modules_of(source).items() for found in imports_of(module, file)]


def room_of(name: str, root: str) -> str | None:
    """The room of a module or of a name in one; None for other packages."""
    parts = name.split(".")
    return None if parts[0] != root else parts[1] if len(parts) > 1 else root


def find_forbidden_imports(source: Path, allowed: Mapping[str, set[str]]) -> list[str]:
    rooms = {room_of(module, source.name) for module in modules_of(source)}
    offenders = [f"room {room} is not in the table" for room in sorted(filter(None, rooms - set(allowed)))]
    for found in all_imports(source):
        importer, target = room_of(found.importer, source.name), room_of(found.target, source.name)
        if target is not None and target not in rooms:
            target = source.name  # a name that the root package re-exports
        if target not in (None, importer, *allowed.get(str(importer), ())):
            offenders.append(str(found))
    return offenders


def find_rings(source: Path) -> list[str]:
    """The first ring among modules, and the first among rooms, as `a -> b -> a`."""
    modules = modules_of(source)
    between_modules: dict[str, set[str]] = {module: set() for module in modules}
    between_rooms: dict[str, set[str]] = {}
    for found in all_imports(source):
        target = found.target if found.target in modules else found.target.rpartition(".")[0]
        if target in modules and target != found.importer:
            between_modules[found.importer].add(target)
            rooms = room_of(found.importer, source.name), room_of(target, source.name)
            if rooms[0] != rooms[1]:
                between_rooms.setdefault(str(rooms[0]), set()).add(str(rooms[1]))
    return [ring for graph in (between_modules, between_rooms) if (ring := _find_ring(graph))]


def find_rings_in_folders(source: Path) -> list[str]:
    """The first ring in each folder below the root, between its sub-folders and its own files, which count as one.

    The `__init__` of the folder is left out: it gathers names and is imported by nobody inside (see `find_rings`).
    """
    modules = modules_of(source)
    packages = {module for module, file in modules.items() if file.name == "__init__.py"}
    graphs: dict[str, dict[str, set[str]]] = {}
    for found in all_imports(source):
        target = found.target if found.target in modules else found.target.rpartition(".")[0]
        for folder in packages & set(accumulate(found.importer.split(".")[:-1], "{}.{}".format)) - {source.name}:
            if target.startswith(f"{folder}."):
                ends = [_part_of(folder, module, packages) for module in (found.importer, target)]
                if ends[0] != ends[1]:
                    graphs.setdefault(folder, {}).setdefault(ends[0], set()).add(ends[1])
    rings = {folder: _find_ring(graph) for folder, graph in sorted(graphs.items())}
    return [f"{folder}: {ring}" for folder, ring in rings.items() if ring]


def _part_of(folder: str, module: str, packages: Collection[str]) -> str:
    """The sub-folder of `folder` that a module is in, or FILES."""
    child = module.removeprefix(f"{folder}.").split(".")[0]
    return child if f"{folder}.{child}" in packages else FILES


def _find_ring(graph: Mapping[str, set[str]]) -> str:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return ""


def draw_rooms(allowed: Mapping[str, set[str]]) -> str:
    """Every room with the rooms that it imports, those left out that another of them imports; the uppermost first."""
    order = list(TopologicalSorter(allowed).static_order())[::-1]
    lines = []
    for room in order:
        direct = [other for other in order if other in allowed[room] and not _is_behind(other, room, allowed)]
        lines.append(f"{room:14}-> {', '.join(direct)}" if direct else room)
    return "\n".join(lines)


def _is_behind(room: str, importer: str, allowed: Mapping[str, set[str]]) -> bool:
    """Whether another room that the importer may import may import this one."""
    return any(room in allowed[other] for other in allowed[importer] if other != room)


def find_torch_distributed(source: Path, allowed_rooms: set[str]) -> list[str]:
    """Imports of torch.distributed, and uses of it through `torch`, outside the rooms that may."""
    offenders = []
    for module, file in modules_of(source).items():
        if room_of(module, source.name) in allowed_rooms:
            continue
        imported = any(f"{found.target}.".startswith("torch.distributed.") for found in imports_of(module, file))
        attributes = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute))
        if imported or any(n.attr == "distributed" and ast.unparse(n.value) == "torch" for n in attributes):
            offenders.append(f"{module} uses torch.distributed")
    return offenders


def plant(root: Path, **files: str) -> Path:
    """A source tree `pkg` with the given files; two underscores stand for a folder."""
    source = root / "pkg"
    for name, text in {"__init__": "", **files}.items():
        path = name if name == "__init__" else name.replace("__", "/")
        file = source / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, *file.parent.relative_to(source).parents):
            (source / folder / "__init__.py").touch()
        file.write_text(text)
    return source


TABLE = {"pkg": {"low", "high"}, "low": set(), "high": {"low"}}


def test_every_import_is_in_the_table() -> None:
    assert find_forbidden_imports(SOURCE, ALLOWED) == []


def test_no_module_and_no_room_is_part_of_a_ring() -> None:
    assert find_rings(SOURCE) == []


def test_no_folder_has_a_ring_between_its_parts() -> None:
    assert find_rings_in_folders(SOURCE) == []


def test_the_table_itself_has_no_ring() -> None:
    assert _find_ring(ALLOWED) == ""


def test_the_readme_draws_the_table() -> None:
    readme = (SOURCE.parent / "README.md").read_text(encoding="utf-8")
    drawn = readme.partition("<!-- rooms:begin -->\n```\n")[2].partition("\n```\n<!-- rooms:end -->")[0]
    rooms = {room: others - {"weft"} for room, others in ALLOWED.items() if room not in ("weft", "__main__")}
    assert drawn == draw_rooms(rooms), "README.md: write what draw_rooms(...) returns between the markers"


def test_a_room_behind_another_is_not_drawn_twice() -> None:
    assert draw_rooms({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == "c             -> b\nb             -> a\na"


def test_only_two_rooms_know_torch_distributed() -> None:
    assert find_torch_distributed(SOURCE, MAY_IMPORT_TORCH_DISTRIBUTED) == []


@pytest.mark.parametrize(
    "line",
    [
        "import pkg.high",
        "import pkg.high.b as b",
        "from pkg import high",
        "from pkg.high import b",
        "from pkg.high.b import f",
        "from ..high import b",
        "from .. import high",
        "def f():\n    from pkg.high import b",
        "if TYPE_CHECKING:\n    import pkg.high.b",
        "from pkg import something",
    ],
)
def test_an_import_upwards_is_found(tmp_path: Path, line: str) -> None:
    source = plant(tmp_path, low__a=line, high__b="f = 1")
    (offender,) = find_forbidden_imports(source, TABLE)
    assert offender.startswith("pkg.low.a:")


@pytest.mark.parametrize("line", ["from pkg.low.a import f", "from pkg.high import c", "import os", "from . import c"])
def test_an_import_downwards_or_beside_is_allowed(tmp_path: Path, line: str) -> None:
    assert find_forbidden_imports(plant(tmp_path, high__b=line, high__c="", low__a="f = 1"), TABLE) == []


def test_a_room_that_is_not_in_the_table_is_found(tmp_path: Path) -> None:
    assert find_forbidden_imports(plant(tmp_path, attic="x = 1"), TABLE) == ["room attic is not in the table"]


def test_a_ring_of_rooms_is_found_where_the_modules_have_none(tmp_path: Path) -> None:
    source = plant(tmp_path, a__one="import pkg.b.one", b__one="", b__two="import pkg.a.two", a__two="")
    (ring,) = find_rings(source)
    assert ring in ("a -> b -> a", "b -> a -> b")


def test_a_ring_of_modules_inside_a_room_is_found(tmp_path: Path) -> None:
    source = plant(tmp_path, a__one="from pkg.a.two import f", a__two="def f():\n    from pkg.a import one")
    assert len(find_rings(source)) == 1


def test_a_ring_of_sub_folders_is_found_where_the_modules_have_none(tmp_path: Path) -> None:
    source = plant(
        tmp_path, a__x__one="import pkg.a.y.one", a__y__one="", a__y__two="from pkg.a.x import two", a__x__two=""
    )
    assert find_rings(source) == []
    (ring,) = find_rings_in_folders(source)
    assert ring in ("pkg.a: x -> y -> x", "pkg.a: y -> x -> y")


def test_a_ring_of_a_folders_files_and_a_sub_folder_is_found_at_every_depth(tmp_path: Path) -> None:
    source = plant(tmp_path, a__b__c__d="from pkg.a.b.low import f", a__b__low="", a__b__high="import pkg.a.b.c.d")
    assert find_rings(source) == []
    (ring,) = find_rings_in_folders(source)
    assert ring.startswith("pkg.a.b: ") and "c" in ring and FILES in ring


def test_a_folder_may_gather_the_names_of_its_sub_folders(tmp_path: Path) -> None:
    source = plant(tmp_path, a__b__c="from pkg.a.low import f", a__low="f = 1", a__high="from pkg.a.low import f")
    (source / "a" / "__init__.py").write_text("from pkg.a.b.c import f")
    assert find_rings(source) == [] and find_rings_in_folders(source) == []


def test_a_module_that_imports_from_its_own_package_is_a_ring(tmp_path: Path) -> None:
    source = plant(tmp_path, a__one="from pkg.a import f", a__two="f = 1")
    (source / "a" / "__init__.py").write_text("from pkg.a.one import g\nfrom pkg.a.two import f")
    assert len(find_rings(source)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "import torch\ndef f():\n    torch.distributed.barrier()",
    ],
)
def test_torch_distributed_is_found_outside_its_rooms(tmp_path: Path, line: str) -> None:
    source = plant(tmp_path, low__a=line, high__b=line)
    assert find_torch_distributed(source, {"high"}) == ["pkg.low.a uses torch.distributed"]


def test_a_namesake_of_torch_distributed_is_no_offence(tmp_path: Path) -> None:
    source = plant(tmp_path, low__a="import torch.distributions\nfrom pkg import distributed")
    assert find_torch_distributed(source, set()) == []
