"""scripts/make-readme-table: from result files to the tables between the markers."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.documents import ROOT

SCRIPT = ROOT / "scripts" / "make-readme-table"
ROWS: list[dict[str, Any]] = [
    {"benchmark": "b", "case": "16 MB", "weft": 1.23456, "peer": 9876.5, "ratio": 8.0, "interval": [7.5, 8.5]},
    {"benchmark": "b", "case": "10 kB", "weft": 0.5, "peer": None, "ratio": None, "interval": None, "raw_ms": [1, 2]},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("make_readme_table", str(SCRIPT))
    spec = importlib.util.spec_from_loader("make_readme_table", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def write_results(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    facts = {"date": "2026-01-31", "machine": {"cpu": "abacus", "cores": 2}, "versions": {"torch": "2.13.0"}}
    (folder / f"{name}.json").write_text(json.dumps({**facts, "rows": rows}))


def test_rows_become_a_table(script: ModuleType, tmp_path: Path) -> None:
    write_results(tmp_path, "all_reduce", ROWS)
    write_results(tmp_path, "empty", [])
    head, _, columns, _, first, second, end = script.render_all(tmp_path).split("\n")[:7]
    assert head.startswith("**all reduce** ([benchmarks/all_reduce.py]") and "abacus, 2 cores" in head
    assert columns == "| case | weft | peer | ratio |"
    assert first == "| 16 MB | 1.235 | 9,876 | 8 (7.5 to 8.5) |"
    assert second == "| 10 kB | 0.5 |  |  |"
    assert end == ""


def test_no_results_leave_no_table(script: ModuleType, tmp_path: Path) -> None:
    assert script.render_all(tmp_path) == script.render_all(tmp_path / "absent") == ""


def test_only_what_is_between_the_markers_changes(script: ModuleType) -> None:
    readme = f"above\n{script.BEGIN}\nold\n{script.END}\nbelow\n"
    assert script.with_tables("README.md", readme, "new\n") == f"above\n{script.BEGIN}\nnew\n{script.END}\nbelow\n"


@pytest.mark.parametrize("readme", ["no markers", "<!-- table:end --><!-- table:begin -->"])
def test_missing_markers_are_refused(script: ModuleType, readme: str) -> None:
    with pytest.raises(SystemExit, match="table:begin"):
        script.with_tables("README.md", readme, "")


def test_a_stale_table_is_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    write_results(tmp_path / "benchmarks" / "results", "all_reduce", ROWS)
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/measured.md"):
        (tmp_path / page).write_text(f"{script.BEGIN}\n{script.END}\n")
    assert script.main(["--check"]) == 1 and "(docs/measured.md)" in capsys.readouterr().out
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0


def test_the_readme_shows_few_figures_with_their_intervals(script: ModuleType, tmp_path: Path) -> None:
    row = {"ranks": 2, "message": "16 MB", "weft, ms": 2.0, "gloo / weft (torch)": 5.5, "interval_of_it": [5.0, 6.0]}
    write_results(tmp_path, "all_reduce", [{**row, "message": "10 kB"}, row])
    *_, line, end = script.render_figures(tmp_path).split("\n")
    assert "| 5.5 (5 to 6) | [all_reduce]" in line and end == ""


def test_the_readme_shows_the_results_that_are_kept(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0
