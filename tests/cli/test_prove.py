"""`weft prove`: what it prints and the codes it leaves with."""

from typing import Any

import pytest

from weft.metrics.convergence import Convergence, judge_convergence
from weft.proving import Proof
from weft.training.recipe import Recipe

PASSED = Proof(True, True, 5, 0.0, 1e-5, "2 ranks gave the parameters of one rank")
FAILED = Proof(False, False, 5, 0.5, 1e-5, "after step 1, 7.bias[3] is off by 0.5 of its largest value")


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the proof was asked for; `found` is what it finds."""
    asked: dict[str, Any] = {"found": PASSED}

    def prove(recipe: Recipe, **options: Any) -> Proof:
        asked.update(plan=str(recipe.mutable.plan), **options)
        found: Proof = asked["found"]
        return found

    monkeypatch.setattr("weft.proving.prove", prove)
    return asked


def test_a_proof_is_0(weft: Any, proofs: dict[str, Any]) -> None:
    outcome = weft("prove", "digits_mlp", "--workers", "2", "--steps", "3", "--seed", "7", "--tolerance", "0.5")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "PASS  digits_mlp  data=2\n      2 ranks gave the parameters of one rank\n"
    assert (proofs["plan"], proofs["num_steps"], proofs["seed"], proofs["tolerance"]) == ("data=2", 3, 7, 0.5)


def test_a_difference_is_1_and_is_named(weft: Any, proofs: dict[str, Any]) -> None:
    proofs["found"] = FAILED
    outcome = weft("prove", "digits_mlp", "--plan", "data=3 topology=ring")
    assert outcome.code == 1
    assert outcome.out.startswith("FAIL  digits_mlp  data=3 topology=ring\n") and "7.bias[3]" in outcome.out


def test_json_is_one_document(weft: Any, proofs: dict[str, Any]) -> None:
    document = weft("prove", "digits_mlp", "--workers", "2", "--json").json
    assert (document["recipe"], document["plan"], document["proof"]["passed"]) == ("digits_mlp", "data=2", True)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("digits_mlq",), "unknown recipe"),
        (("digits_mlp", "--plan", "dta=2"), "did you mean 'data'?"),
        (("digits_mlp", "--steps", "0"), "Invalid value for '--steps'"),
    ],
)
def test_bad_input_is_2(weft: Any, line: tuple[str, ...], text: str) -> None:
    outcome = weft("prove", *line)
    assert (outcome.code, outcome.out) == (2, "") and text in outcome.err


RELAXED = ("prove", "digits_mlp", "--plan", "data=2 consistency=local(2)", "--set", "target=accuracy:0.9")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the gate was asked for; `samples` is what the plan needs, where one rank needs 100."""
    asked: dict[str, Any] = {"samples": 100.0}

    def check(recipe: Recipe, **options: Any) -> Convergence:
        asked.update(options)
        return judge_convergence([asked["samples"]] * 5, [100.0] * 5, margin=options["margin"])

    monkeypatch.setattr("weft.proving.check_convergence", check)
    return asked


def test_a_relaxed_plan_must_also_converge(weft: Any, proofs: dict[str, Any], verdicts: dict[str, Any]) -> None:
    outcome = weft(*RELAXED, "--seed", "3", "--margin", "0.25")
    assert outcome.code == 0 and outcome.out.startswith("PASS  digits_mlp  data=2 consistency=local(steps=2)\n")
    assert outcome.out.endswith(
        "100 samples to the target, one rank 100: 1 times as many (1 to 1), shown to be less than 1.25 (p = 0.004)\n"
    )
    assert (list(verdicts["seeds"]), verdicts["margin"]) == ([3, 4, 5, 6, 7], 0.25)
    verdicts["samples"] = 1000.0
    slow = weft(*RELAXED)
    assert slow.code == 1 and slow.out.startswith("FAIL") and "10 times as many" in slow.out


def test_json_holds_both_verdicts(weft: Any, proofs: dict[str, Any], verdicts: dict[str, Any]) -> None:
    document = weft(*RELAXED, "--json").json
    assert document["proof"]["passed"] and document["convergence"]["passed"]
    assert document["convergence"]["samples"] == [100.0] * 5


def test_convergence_is_not_looked_at_where_the_equations_are_not_kept_or_nobody_asks(
    weft: Any, proofs: dict[str, Any], verdicts: dict[str, Any]
) -> None:
    assert "samples" not in weft(*RELAXED, "--seeds", "0").out
    proofs["found"] = FAILED
    assert weft(*RELAXED).code == 1
    assert "seeds" not in verdicts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--set", "target=none"), "no target to converge to"),
        (("--set", "target=accuracy:0.9", "--seeds", "4"), "give at least 5"),
    ],
)
def test_what_cannot_be_judged_is_2(weft: Any, proofs: dict[str, Any], options: tuple[str, ...], text: str) -> None:
    outcome = weft(*RELAXED[:4], *options)
    assert outcome.code == 2 and text in outcome.err and "plan" not in proofs


@pytest.mark.slow
def test_two_real_ranks_are_proven(weft: Any) -> None:
    outcome = weft("prove", "digits_mlp", "--workers", "2", "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert "to the last bit" in outcome.out


def test_executors_are_compared(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("prove", *tiny, "--executor", "graph", "--steps", "2")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith("PASS  digits_mlp  graph against eager\n") and "to the last bit" in outcome.out


def test_two_executors_a_tolerance_and_json(weft: Any, tiny: tuple[str, ...]) -> None:
    line = ("prove", *tiny, "--executor", "tape", "--executor", "reference", "--steps", "1", "--tolerance", "1e-12")
    outcome = weft(*line, "--json")
    assert outcome.code == 1
    assert outcome.json["executors"] == ["tape", "reference"]
    assert outcome.json["proof"]["operator"]["error"] > 1e-12


def test_three_executors_and_ranks_are_refused(weft: Any) -> None:
    three = weft("prove", "digits_mlp", *(word for name in "abc" for word in ("--executor", name)))
    assert three.code == 2 and "give one or two" in three.err
    ranks = weft("prove", "digits_mlp", "--executor", "graph", "--workers", "2")
    assert ranks.code == 2 and "compared on one rank" in ranks.err
