"""`weft launch`: a script of one's own on several ranks."""

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, pathlib, sys
rank, size = os.environ["WEFT_RANK"], os.environ["WEFT_SIZE"]
pathlib.Path(f"rank-{rank}").write_text(f"{rank} of {size}: {' '.join(sys.argv[1:])}")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def test_every_rank_runs_the_script_with_its_arguments(weft: Any, script: Path, tmp_path: Path) -> None:
    outcome = weft("launch", "--workers", "2", script, "--", "--fast", "3")
    assert (outcome.code, outcome.err) == (0, "")
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["0 of 2: --fast 3", "1 of 2: --fast 3"]


def test_the_script_that_fails_is_told_with_its_rank(weft: Any, script: Path) -> None:
    script.write_text("import os\nif os.environ['WEFT_RANK'] == '1': raise ValueError('seven is not six')\n")
    outcome = weft("launch", "--workers", "2", script)
    assert outcome.code == 3 and "rank 1 of 2: seven is not six" in outcome.err


def test_a_script_that_is_not_there_is_2(weft: Any) -> None:
    outcome = weft("launch", "absent.py")
    assert (outcome.code, outcome.out) == (2, "") and "no such script (absent.py)" in outcome.err


def test_what_each_rank_prints_is_kept(weft: Any, script: Path, tmp_path: Path) -> None:
    script.write_text("import os\nprint('this is', os.environ['WEFT_RANK'])\n")
    outcome = weft("launch", "--workers", "2", "--logs", tmp_path / "logs", script)
    assert outcome.code == 0
    assert [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in range(2)] == ["this is 0\n", "this is 1\n"]
