"""Scripts given to prove, simulate, profile and run --replay, as they are given to launch."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.small_script import SCRIPT, write_script
from weft.runs.script import Script
from weft.runs.script_run import create_script_run

pytestmark = pytest.mark.slow


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write_script(tmp_path, SCRIPT)


def test_a_script_is_proved_on_ranks(weft: Any, script: Path) -> None:
    outcome = weft("prove", script, "--workers", "2", "--steps", "3", "--json", "--", "--lr", "3")
    assert outcome.code == 0
    proof = outcome.json["proof"]
    assert proof["passed"] and proof["num_steps"] == 3 and proof["causes"] == []


def test_a_script_that_fails_its_proof_is_1_and_its_cause_is_told(weft: Any, script: Path) -> None:
    script.write_text(
        SCRIPT.replace("model, optimizer, loader = ", "model, optimizer, _ = ").replace(", shuffle=True", "")
    )
    outcome = weft("prove", script, "--workers", "2", "--steps", "2")
    assert outcome.code == 1 and outcome.out.startswith(f"FAIL  {script}  2 ranks\n")
    assert "cause: unshared batches: every rank was given the same batch" in outcome.out


def test_a_plan_with_parameters_of_their_own_is_refused(weft: Any, script: Path) -> None:
    outcome = weft("prove", script, "--plan", "data=2 consistency=local(4)")
    assert outcome.code == 2 and "parameters of their own" in outcome.err


def test_virtual_ranks_end_with_the_parameters_of_real_ones(weft: Any, script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert weft("launch", "--workers", "2", "--out", run, script).code == 0
    real = [json.loads((run / f"rank-{rank}.json").read_text()) for rank in range(2)]
    outcomes = [weft("simulate", script, "--ranks", "2", "--compute-seconds", "0.01", "--json") for _ in range(2)]
    assert outcomes[0].code == 0 and outcomes[0].out == outcomes[1].out
    document = json.loads(outcomes[0].out.partition("\n")[2])  # behind what the script printed
    assert document["simulation"]["digests"] == [end["parameters"] for end in real]
    assert [end["updates"] for end in real] == [6, 6] == [document["simulation"]["steps"]] * 2


def test_an_asynchronous_script_is_repeated_to_the_last_bit(weft: Any, script: Path, tmp_path: Path) -> None:
    run, plan = tmp_path / "run", "data=2 consistency=async topology=server"
    script.write_text(SCRIPT + "import os\nif os.path.exists('other'): model[0].bias.data += 1\n")
    assert weft("launch", "--plan", plan, "--out", run, script).code == 0
    assert (run / "decisions/seed-0/shard-0.jsonl").is_file()
    again = weft("run", "--replay", run)
    assert again.code == 0 and "on every rank, to the last bit" in again.err
    virtual = weft("simulate", "--replay", run, "--compute-seconds", "0.01")
    assert virtual.code == 0 and "on every rank, to the last bit" in virtual.err
    (tmp_path / "other").touch()
    differs = weft("simulate", "--replay", run, "--compute-seconds", "0.01")
    assert differs.code == 1 and "replay differs" in differs.err and "ranks: 0, 1" in differs.err


def test_what_cannot_be_replayed_is_refused(weft: Any, script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    create_script_run(run, Script(str(script)), 2, None)
    assert "did not come to its end" in weft("run", "--replay", run).err
    script.write_text("")
    assert "script has changed since it was recorded" in weft("run", "--replay", run).err
    assert "a replayed run keeps its settings (--plan)" in weft("run", "--replay", run, "--plan", "data=2").err
    (run / "script.json").write_text("{}")
    assert "run of a script cannot be read" in weft("run", "--replay", run).err
    assert f"folder is not empty ({run})" in weft("launch", "--out", run, script).err


def test_where_the_time_of_a_script_goes(weft: Any, script: Path) -> None:
    script.write_text(SCRIPT.replace("range(2)", "range(9)"))
    outcome = weft("profile", script, "--workers", "2", "--steps", "3", "--json")
    assert outcome.code == 0
    found = outcome.json["profile"]
    assert found["seconds"]["count"] == 3 and found["parts"]["update"] > 0 and found["parts"]["communication"] > 0
    calls = {(row["target"], row["part"]): row for row in found["operators"]}
    assert calls["aten.addmm", "forward"]["count"] == 2 and calls["aten.mm", "backward"]["cost"]["flops"] > 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("prove", "absent.py"), "no such script (absent.py)"),
        (("simulate", "absent.py"), "no such script (absent.py)"),
        (("profile", "absent.py"), "no such script (absent.py)"),
        (("prove", "digits_mlp", "--", "--lr"), "a recipe takes no arguments"),
        (("simulate", "train.py", "--set", "epochs=3"), "no such option for a script (--set)"),
        (("profile", "digits_mlp", "--workers", "2"), "a recipe is profiled on one rank"),
    ],
)
def test_wrong_use_is_2(weft: Any, words: tuple[str, ...], error: str) -> None:
    outcome = weft(*words)
    assert outcome.code == 2 and error in outcome.err
