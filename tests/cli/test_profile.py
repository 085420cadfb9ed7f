"""`weft profile`: tables, JSON, and what it trains."""

from typing import Any

import pytest

from tests.operators.rooflines import ROUND


@pytest.fixture(autouse=True)
def roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.operators.roofline.measure_roofline", lambda _threads: ROUND)


def test_the_tables_tell_kinds_operators_and_the_roof(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("profile", *tiny, "--steps", "2", "--top", "40")
    assert (outcome.code, outcome.err) == (0, "")
    assert "aten.addmm" in outcome.out and ".py:" in outcome.out and "GFLOP/s" in outcome.out
    assert "operators take" in outcome.out and "median of 2 steps" in outcome.out


def test_json_has_every_operator(weft: Any, tiny: tuple[str, ...]) -> None:
    document = weft("profile", *tiny, "--steps", "2", "--json", "--set", "accumulate=2").json
    operators = document["profile"]["operators"]
    assert document["recipe"] == "digits_mlp"
    assert {"forward", "backward"} == {operator["role"] for operator in operators}
    product = next(operator for operator in operators if operator["target"] == "aten.addmm")
    assert product["shape"][0] == 64  # a micro-batch
    assert document["profile"]["unknown"] == []


def test_an_unknown_recipe_is_2(weft: Any) -> None:
    outcome = weft("profile", "digits_mlq")
    assert outcome.code == 2 and "did you mean" in outcome.err
