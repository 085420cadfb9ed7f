"""scripts/make-compression-table: the accuracy tables of docs/compression.md."""

import importlib.machinery
import importlib.util
from types import ModuleType

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
        script.with_tables("nothing", "")
    assert script.with_tables(f"a{script.BEGIN}old{script.END}b", "new\n") == f"a{script.BEGIN}\nnew\n{script.END}b"


def test_the_page_shows_the_results_that_are_kept(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0
    results = read_results(RESULT)
    judged = [training.key for training in TRAININGS if training.key in results and training.scheme != DENSE]
    assert judged and all(verdict_of(results, key).passed for key in judged)
    assert len(results) == len(TRAININGS), "nothing is left out"
