"""Rank programs: import paths and JSON, and the notes that a rank leaves."""

from pathlib import Path

import pytest

from weft.engines.rank_process import run_rank
from weft.engines.rank_program import INTERRUPTED, RankProgram, has_result, read_failure, read_result


def run(folder: Path, path: str, **arguments: object) -> int:
    RankProgram(path, arguments).write(folder)
    return run_rank(folder, 0)


def test_a_program_survives_its_file(tmp_path: Path) -> None:
    program = RankProgram("math:hypot", {"x": [1, 2.5, None, "é"]})
    program.write(tmp_path)
    assert RankProgram.read(tmp_path) == program


def test_the_result_is_left_in_the_folder(tmp_path: Path) -> None:
    assert run(tmp_path, "json:dumps", obj={"a": 1}) == 0
    assert read_result(tmp_path, 0) == '{"a": 1}'
    assert has_result(tmp_path, 0)
    assert read_failure(tmp_path, 0) is None


def test_a_failure_is_left_with_its_traceback(tmp_path: Path) -> None:
    assert run(tmp_path, "json:loads", s="{") == 3
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert (failure.rank, failure.kind, failure.exit_code) == (0, "JSONDecodeError", 3)
    assert "in loads" in failure.traceback
    assert not has_result(tmp_path, 0)


def test_a_result_that_json_cannot_hold_is_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, "builtins:object") == 3
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert "JSON serializable" in failure.text


@pytest.mark.parametrize(
    ("error", "exit_code", "is_witness"),
    [("value", 3, False), ("usage", 2, False), ("lost", 3, True)],
)
def test_a_witness_is_told_from_a_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, exit_code: int, is_witness: bool
) -> None:
    for name, value in {"WEFT_RANK": "0", "WEFT_SIZE": "2", "WEFT_MEETING": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert run(tmp_path, "tests.processes.plain:fail", rank=0, how=error) == exit_code
    failure = read_failure(tmp_path, 0)
    assert failure is not None
    assert failure.is_witness == is_witness


def test_an_interrupt_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "tests.processes.plain:interrupt_itself") == INTERRUPTED
    assert read_failure(tmp_path, 0) is None
