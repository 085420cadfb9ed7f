"""scripts/train-every-scheme: its commands, what it keeps of a run, and the tables of docs/consistency.md."""

import importlib.machinery
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.commands import find_fault
from tests.docs.documents import ROOT
from weft.runs.job import choose_recipe
from weft.training.build import check_recipe

SCRIPT = ROOT / "scripts" / "train-every-scheme"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("train_every_scheme", str(SCRIPT))
    spec = importlib.util.spec_from_loader("train_every_scheme", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    loader.exec_module(module)
    return module


def document(**values: Any) -> dict[str, Any]:
    """What `weft run --json` prints, as far as it is read."""
    kept = {"test/accuracy": 0.98, "time_to_target": 3.5, "wall_clock": 4.0, "bytes_per_step": 8600.0, **values}
    repetition = {"values": kept, "evaluations": [{"epoch": 1.0}, {"epoch": 2.5}]}
    record = {"recipe": {"fixed": {"target": {"metric": "accuracy", "bound": 0.9}}}, "versions": {"torch": "2"}}
    return {"accepted": True, "record": {**record, "repetitions": [repetition]}}


def test_every_command_is_one_that_weft_understands(script: ModuleType) -> None:
    everything = (*script.TRAININGS, *script.PROOFS)
    assert len({training.command for training in everything}) == len(everything)
    for training in everything:
        assert find_fault(training.command, ROOT) == ""
        if script.is_understood(training):
            _, recipe, _, plan, *options = training.words
            settings = [value for option, value in pairwise(options) if option == "--set"]
            check_recipe(choose_recipe(recipe, settings, plan, None))


def test_words_choose_recipe_ranks_and_scheme(script: ModuleType) -> None:
    chosen = [t for t in script.TRAININGS if script.is_chosen(t, "digits_mlp,64,gossip,ring")]
    assert [t.key for t in chosen] == [("digits_mlp", 64, "gossip, ring", False)]
    assert {t.ranks for t in script.TRAININGS if script.is_chosen(t, "4")} == {4}
    assert all(script.is_chosen(t, "") for t in script.TRAININGS)


@pytest.mark.parametrize(("seconds", "accepted", "met"), [(3.5, True, True), ("inf", True, False), (3.5, False, False)])
def test_target_and_rules_must_both_be_met(script: ModuleType, seconds: Any, accepted: bool, met: bool) -> None:
    run = {**document(time_to_target=seconds), "accepted": accepted}
    found = script.summary_of(script.TRAININGS[0], run, 9.0)
    assert (found["met"], found["epochs"], found["command"]) == (met, 2.5, "weft run digits_mlp --plan data=4")


def test_only_what_is_missing_is_trained(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = script.TRAININGS[:2]
    trained = []

    def train(training: Any) -> dict[str, Any]:
        trained.append(training.key)
        return dict(script.summary_of(training, document(), 9.0))

    monkeypatch.setattr(script, "train", train)
    out = tmp_path / "schemes.json"
    script.train_all([second], out)
    script.train_all([first, second], out)
    assert trained == [second.key, first.key]
    assert list(script.read_results(out)) == [first.key, second.key]
    script.write_results(out, {first.key: {**script.read_results(out)[first.key], "command": "another"}})
    script.train_all([first], out)
    assert trained[2:] == [first.key], "a result of another command does not count"
    assert "there already" in capsys.readouterr().out


def test_a_plan_that_is_refused_is_skipped(script: ModuleType, tmp_path: Path) -> None:
    planted = script.Training("digits_mlp", 4, script.Scheme("planted", "consistency=hearsay", "sum"))
    script.train_all([planted], tmp_path / "schemes.json")
    assert not (tmp_path / "schemes.json").exists()


def test_stale_tables_are_found(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.PAGE.write_text(f"above\n\n{script.BEGIN}\n{script.END}\n\nbelow\n")
    training = script.TRAININGS[1]
    script.write_results(tmp_path / "r.json", {training.key: script.summary_of(training, document(), 9.0)})
    arguments = ["--out", str(tmp_path / "r.json")]
    assert script.main([*arguments, "--check"]) == 1
    assert script.main([*arguments, "--table"]) == script.main([*arguments, "--check"]) == 0
    page = script.PAGE.read_text()
    assert page.startswith("above\n") and page.endswith("\nbelow\n")
    assert f"| local SGD | `{training.command}` | 0.980 | met | 2.5 | 4 | 8.6 |" in page


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("arrives", [True, False])
def test_a_verdict_needs_equations_and_samples(script: ModuleType, follows: bool, arrives: bool) -> None:
    samples = {"samples": [3], "reference": [2], "ratio": 1.5, "ratio_interval": {"low": 1, "high": 2}, "p_value": 0.25}
    proof = script.PROOFS[0]
    found = script.verdict_of(proof, {"proof": {"passed": follows}, "convergence": {**samples, "passed": arrives}}, 9.0)
    verdict = "PASS" if follows and arrives else "FAIL"
    page = script.render({proof.key: found})
    assert f"| local SGD | `{proof.command}` | 1.50 (1.00 to 2.00) | 0.25 | {verdict} |" in page
    assert script.describe(found) == f"1.5 times the samples, {verdict}"


def test_missing_markers_are_refused(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "page.md")
    script.PAGE.write_text("nothing")
    with pytest.raises(SystemExit, match="schemes:begin"):
        script.write_page({}, is_check=False)


def test_the_page_shows_the_results_that_are_kept(script: ModuleType) -> None:
    assert script.main(["--check"]) == 0
    assert all(found["met"] for found in script.read_results(script.RESULTS).values() if "met" in found)
