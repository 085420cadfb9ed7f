"""scripts/make-compression-table: the accuracy tables of docs/compression.md."""

import importlib.machinery
import importlib.util
from types import ModuleType
from typing import Any

import pytest

from benchmarks.compression_gate import DENSE, RESULT, TRAININGS, Training, read_results, verdict_of
from tests.benchmarks.test_compression_gate import row
from tests.docs.documents import ROOT

SCRIPT = ROOT / "scripts" / "make-compression-table"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("make_compression_table", str(SCRIPT))
    spec = importlib.util.spec_from_loader("make_compression_table", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_a_line_has_the_median_its_interval_and_a_verdict(script: ModuleType) -> None:
    dense, good, bad = (Training("digits_cnn", name) for name in (DENSE, "qsgd(4)", "terngrad"))
    results = {dense.key: row(dense, 0.9), good.key: row(good, 0.899), bad.key: row(bad, 0.85)}
    lines = script.render(results).splitlines()
    assert lines[0] == f"**digits_cnn**: `{dense.command}`"
    assert "| `none` | 90.20% (90.00 to 90.40) |  |  |  | 1.00 |" in lines
    assert "| `qsgd(4)` | 90.10% (89.90 to 90.30) | -0.10 (-0.10 to -0.10) | 0.004 | PASS | 1.00 |" in lines
    assert "| `terngrad` | 85.20% (85.00 to 85.40) | -5.00 (-5.00 to -5.00) | 1 | FAIL | 1.00 |" in lines
    assert script.render({good.key: row(good, 0.9)}) == "", "without dense runs there is nothing to compare with"


def test_missing_markers_are_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="gate:begin"):
        script.with_tables("nothing", "gate", "")
    begin, end = "<!-- gate:begin -->", "<!-- gate:end -->"
    assert script.with_tables(f"a{begin}old{end}b", "gate", "new\n") == f"a{begin}\nnew\n{end}b"


def step(case: str, link: str, seconds: float, faster: float | None) -> dict[str, Any]:
    about = {"workload": "mlp", "link": link, "case": case, "seconds per step": seconds, "interval_of_step": None}
    ratios = {"times as fast as DDP": faster, "share of free communication": None}
    interval = {"interval_of_times as fast as DDP": [faster, faster]} if faster else {}
    return {**about, "MB sent": 1.5, **ratios, **interval, "times as fast as the best hook": None}


def test_every_link_has_a_table(script: ModuleType) -> None:
    rows = [step("ddp", "1gbit", 1.5, None), step("data=4", "1gbit", 0.5, 3.0), step("ddp", "10gbit", 0.4, None)]
    lines = script.render_links(rows).splitlines()
    assert [line for line in lines if line.startswith("**")] == ["**mlp, 1 Gbit/s**", "**mlp, 10 Gbit/s**"]
    assert "| `data=4` | 0.500 | 1.50 | 3.00 (3.00 to 3.00) |  |  |" in lines


def test_time_to_a_target_is_that_of_its_steps(script: ModuleType) -> None:
    steps = [step("ddp", "100mbit", 12.0, None), step("ddp", "1gbit", 1.5, None)]
    row = {
        "workload": "mlp",
        "link": "unlimited",
        "case": "ddp",
        "test accuracy to reach": 0.85,
        "accuracy then": 0.8512,
    }
    never = {**row, "case": "data=4", "steps": None, "samples": None, "accuracy then": 0.8}
    lines = script.render_targets([{**row, "steps": 100, "samples": 3200}, never], steps).splitlines()
    assert "| | steps | samples | accuracy then | seconds at 100 Mbit/s, 1 Gbit/s |" in lines
    assert "| `ddp` | 100 | 3,200 | 0.851 | 1,200, 150 |" in lines
    assert "| `data=4` | not reached |  | 0.800 | not measured, not measured |" in lines


def test_the_page_shows_the_results_that_are_kept(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0
    results = read_results(RESULT)
    judged = [training.key for training in TRAININGS if training.key in results and training.scheme != DENSE]
    assert judged and all(verdict_of(results, key).passed for key in judged)
    assert len(results) == len(TRAININGS), "nothing is left out"
