"""The benchmark of sparse sums, small: every algorithm in a row, and what it says of the choice."""

import json
from pathlib import Path

import pytest

from benchmarks.sparse_sums import main, measure
from weft.distributed.codecs.sparse_sums import SPARSE_ALGORITHMS


@pytest.mark.parametrize("kind", ["random", "identical"])
def test_a_row_holds_every_sum_and_the_choice_among_them(kind: str) -> None:
    row = measure("random" if kind == "random" else "identical", 4, 4096, 0.01)
    assert set(row["raw_bytes"]) == {"dense", *SPARSE_ALGORITHMS}
    assert {f"{by}, ms" for by in row["raw_bytes"]} == {key for key in row if key.endswith(", ms")}
    assert row["chosen"] in SPARSE_ALGORITHMS and row[f"{row['fastest']}, ms"] <= row["gather, ms"]
    assert row["raw_bytes"]["gather"] == 3 * (8 + 41 * 8)
    assert 1.0 <= row["chosen / fastest"] < 1.1


def test_the_table_tells_the_worst_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "2", "4", "--length", "1024", "--out", str(tmp_path / "rows.json")])
    document = json.loads((tmp_path / "rows.json").read_text())
    assert len(document["raw_rows"]) == 28 and document["link"]["alpha"] == 1e-4
    missed = [row for row in document["raw_rows"] if row["chosen"] != row["fastest"]]
    assert len(document["rows"]) >= 8 and all(row in document["rows"] for row in missed)
    worst = max(row["chosen / fastest"] for row in document["raw_rows"])
    assert f"at most {worst:.3f} times as long" in capsys.readouterr().out
