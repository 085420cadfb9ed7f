"""`weft show`: the result of a run folder, or what is wrong with it."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.metrics.measure import Measurements
from weft.records.record import Repetition
from weft.records.record_file import new_record, write_record


def test_result_and_how_it_was_made(weft: Any, finished_run: Path) -> None:
    outcome = weft("show", finished_run)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("digits_mlp\n  done, all samples used: seeds 0, 1\n")
    assert "(min .. max)" in outcome.out and "\nmade with\n  fixed       model=mlp" in outcome.out


def test_record_file_will_do_as_well(weft: Any, finished_run: Path) -> None:
    assert weft("show", finished_run / "record.json").out == weft("show", finished_run).out


def test_json_is_the_record_and_its_path(weft: Any, finished_run: Path) -> None:
    document = weft("show", finished_run, "--json").json
    assert document["path"] == str(finished_run)
    assert [r["seed"] for r in document["record"]["repetitions"]] == [0, 1]


def test_run_that_has_not_ended_is_not_accepted(weft: Any, tmp_path: Path) -> None:
    write_record(tmp_path, replace(new_record("mine"), repetitions=(Repetition(0, "interrupted", "", ""),)))
    assert weft("show", tmp_path, "--json").json["accepted"] is False


def test_measured_loop_of_a_user(weft: Any) -> None:
    ticks = iter(0.01 * i for i in range(1000))
    mine = Measurements("mine", clock=lambda: next(ticks))
    for _ in mine.measured(range(20), "train"):
        pass
    mine.save("here")
    assert "  train/step_time   10.00  10.00 .. 10.00  ms " in weft("show", "here").out


def test_terminal_that_cannot_show_a_micro_sign_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ticks = iter(2e-6 * i for i in range(1000))
    mine = Measurements("mine", clock=lambda: next(ticks))
    with mine.measure("forward"):
        pass
    mine.save(tmp_path)
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit, match="0"):
        main(["show", str(tmp_path)])
    output.seek(0)
    assert "2.000    ?s " in output.read()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "cut off or not JSON"),
        ('{"schema": 1, "name"', "cut off or not JSON"),
        ("[1, 2]", "is not a run record"),
        ('{"schema": 1}', "was changed after it was written"),
        ('{"schema": 999}', "was written by a newer Weft"),
    ],
)
def test_corrupt_record_is_2(weft: Any, tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "record.json").write_text(text)
    outcome = weft("show", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert error in outcome.err


def test_record_with_one_digit_changed_is_2(weft: Any, tmp_path: Path, finished_run: Path) -> None:
    text = (finished_run / "record.json").read_text()
    assert '"seed": 1' in text
    (tmp_path / "record.json").write_text(text.replace('"seed": 1', '"seed": 2'))
    assert "was changed after it was written" in weft("show", tmp_path).err


@pytest.mark.parametrize("path", ["absent", "."])
def test_folder_that_is_no_run_is_2(weft: Any, path: str) -> None:
    outcome = weft("show", path)
    assert outcome.code == 2 and "no run record here" in outcome.err
