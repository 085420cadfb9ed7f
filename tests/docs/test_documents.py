"""What README, CONTRIBUTING and docs/ say: code that runs, commands and files that exist, nothing that is missing."""

import doctest
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main

import weft
from tests.docs.commands import find_fault
from tests.docs.documents import DOCUMENTS, ROOT, blocks_of, commands_of, find_dead_links, links_of
from weft.cli.main import app
from weft.metrics.metric import METRICS
from weft.recipes import BUILT_IN
from weft.specs.axes import AXES, DEGREES
from weft.training.build import EXECUTORS
from weft.training.component import options_of
from weft.training.datasets import DATASETS
from weft.training.losses import LOSSES
from weft.training.models import MODELS
from weft.training.optimizers import OPTIMIZERS
from weft.training.recipe import Fixed, Mutable
from weft.training.sampling import SAMPLERS
from weft.training.schedules import SCHEDULES

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)


def run_blocks(text: str, name: str) -> None:
    """Run the Python blocks of a document one after the other in one namespace; prompts are held to their output."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(text, "python"):
        if ">>> " in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, names, name, name, block.line)
            doctest.DebugRunner(optionflags=FLAGS).run(test, clear_globs=False)
            names.update(test.globs)
        else:
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), names)


@by_name
def test_python_blocks_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(document.read_text(encoding="utf-8"), document.name)
    weft.measurements.clear()


def test_a_block_that_fails_is_found() -> None:
    with pytest.raises(ZeroDivisionError):
        run_blocks("```python\nx = 0\n```\n\n```python\n1 / x\n```\n", "planted")


def test_a_block_whose_output_differs_is_found() -> None:
    with pytest.raises(doctest.DocTestFailure):
        run_blocks("```python\n>>> 1 + 1\n3\n```\n", "planted")


@by_name
def test_links_lead_to_files(document: Path) -> None:
    assert find_dead_links(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("[b](b.md) [a](a.md#part) [web](https://example.org) `[c](c.md)`")
    assert find_dead_links(tmp_path / "a.md") == ["b.md", "c.md"]


@by_name
def test_commands_exist(document: Path) -> None:
    faults = {line: find_fault(line, ROOT) for line in commands_of(document.read_text(encoding="utf-8"))}
    assert {line: fault for line, fault in faults.items() if fault} == {}


@pytest.mark.parametrize("document", [ROOT / "docs" / "distributed.md"], ids=lambda file: file.name)
def test_lines_for_mpirun_work_for_root_too(document: Path) -> None:
    """Open MPI refuses to start as root, as one is in a container, unless it is told twice or by this option."""
    lines = [line for line in commands_of(document.read_text(encoding="utf-8")) if line.startswith("mpirun ")]
    assert lines
    for line in lines:
        options = [word for word in shlex.split(line) if word.startswith("--")]
        subprocess.run([Path(sys.executable).parent / "mpirun", *options, "-n", "2", "true"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("weft run digits_mlp --workers 2", ""),
        ("weft --version", ""),
        ("weft fly", "no such sub-command: fly"),
        ("weft run digits_mlp --wrkers 2", "no such option: --wrkers"),
        ("weft simulate train.py --ranks 8 -- --epochs 1", ""),
        ("weft launch --workers 2 train.py --lr 0.1  # the script's", ""),
        ("weft launch --wrkers 2 train.py", "no such option: --wrkers"),
        ("torchrun --nproc-per-node 2 -m weft run digits_mlp", ""),
        ("torchrun --nproc-per-node 2 -m weft fly", "no such sub-command: fly"),
        ("mpirun -n 2 python examples/absent.py", "no such file: examples/absent.py"),
        ("mpirun -n 2 weft run --absent", "no such option: --absent"),
        ("python -m benchmarks.training_step --case mlp", ""),
        ("python -m benchmarks.absent", "no such file: benchmarks/absent.py"),
        ("make absent", "no such target: absent"),
        ("make demo", ""),
        ("scripts/absent", "no such file: scripts/absent"),
        ("frobnicate", "unknown command: frobnicate"),
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str, fault: str) -> None:
    assert find_fault(command, ROOT) == fault


def find_unshown(names: Iterable[str], text: str) -> list[str]:
    """The names that stand nowhere in the text as code: alone, or first in `name(...)` and `name=...`."""
    return [name for name in names if not any(f"`{name}{end}" in text for end in ("`", "(", "="))]


def shown() -> str:
    return "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)


@pytest.mark.parametrize(
    "names",
    [
        *(BUILT_IN, DATASETS, MODELS, LOSSES, OPTIMIZERS, SCHEDULES, SAMPLERS, EXECUTORS, METRICS),
        *(DEGREES, AXES, *AXES.values()),
    ],
    ids=lambda names: next(iter(names)),
)
def test_every_name_of_a_catalogue_is_shown(names: Iterable[str]) -> None:
    assert find_unshown(names, shown()) == []


def test_every_key_of_a_recipe_is_shown() -> None:
    assert find_unshown([field.name for part in (Fixed, Mutable) for field in fields(part)], shown()) == []


@pytest.mark.parametrize(
    "catalogue",
    [DATASETS, MODELS, LOSSES, OPTIMIZERS, SCHEDULES, SAMPLERS, EXECUTORS],
    ids=lambda catalogue: next(iter(catalogue)),
)
def test_every_option_of_a_component_is_shown(catalogue: Mapping[str, Callable[..., Any]]) -> None:
    words = set(re.findall(r"\w+", shown()))
    assert {option for factory in catalogue.values() for option in options_of(factory)} - words == set()


def test_a_name_that_is_not_shown_is_found() -> None:
    assert find_unshown(["ring", "tree", "data"], "`ring` and tree, as in `data=2`") == ["tree"]


def commands_below(command: Any, name: str) -> dict[str, Any]:
    """Every sub-command by its full name: `weft cluster probe`."""
    below = getattr(command, "commands", {})
    found = {name: command} if not below else {}
    return found | {k: v for part, sub in below.items() for k, v in commands_below(sub, f"{name} {part}").items()}


def test_every_command_and_option_is_shown() -> None:
    text, commands = shown(), commands_below(typer.main.get_command(app), "weft")
    options = {o for c in commands.values() for p in c.params for o in p.opts if o.startswith("--")}
    assert "weft cluster probe" in commands
    assert [name for name in commands if name not in text] == []
    assert sorted(option for option in options if option not in text) == []


def test_every_public_name_is_shown() -> None:
    text = shown()
    assert [name for name in weft.__all__ if name not in text] == []


def test_the_readme_uses_public_names_only() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = "\n".join(block.text for block in blocks_of(readme, "python"))
    assert "from weft." not in code and "import weft." not in code


def test_the_tour_has_six_stops() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tour = readme.partition("## A guided tour")[2].partition("\n## ")[0]
    assert len(links_of(tour)) == 6
