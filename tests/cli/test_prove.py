"""`weft prove`: what it prints and the codes it leaves with."""

from typing import Any

import pytest

from weft.distributed.proof import Proof
from weft.training.recipe import Recipe

PASSED = Proof(True, True, 5, 0.0, 1e-5, "2 ranks gave the parameters of one rank")
FAILED = Proof(False, False, 5, 0.5, 1e-5, "after step 1, 7.bias[3] is off by 0.5 of its largest value")


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the proof was asked for; `found` is what it finds."""
    asked: dict[str, Any] = {"found": PASSED}

    def prove(recipe: Recipe, **options: Any) -> Proof:
        asked.update(plan=recipe.mutable.plan, **options)
        found: Proof = asked["found"]
        return found

    monkeypatch.setattr("weft.engines.proving.prove", prove)
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


@pytest.mark.slow
def test_two_real_ranks_are_proven(weft: Any) -> None:
    outcome = weft("prove", "digits_mlp", "--workers", "2", "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert "to the last bit" in outcome.out
