"""`weft list`: what can be trained on what, and how to get what is not here."""

from pathlib import Path
from typing import Any

import pytest

from weft.recipes import BUILT_IN
from weft.training.datasets import DATASETS


@pytest.fixture(autouse=True)
def empty_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WEFT_DATA", raising=False)


def test_every_recipe_and_data_set_has_its_line(weft: Any) -> None:
    outcome = weft("list")
    assert (outcome.code, outcome.err) == (0, "")
    first_words = [line.split()[0] for line in outcome.out.splitlines() if line.startswith("  ")]
    assert set(first_words) >= {*BUILT_IN, *DATASETS, "ray", "pillow"}


def test_data_set_that_is_missing_names_its_cure_on_one_line(weft: Any) -> None:
    (line,) = (line for line in weft("list").out.splitlines() if line.startswith("  cifar10 "))
    assert "missing" in line and "curl" in line


def test_json(weft: Any) -> None:
    document = weft("list", "--json").json
    assert document["recipes"].keys() == BUILT_IN.keys()
    found = {dataset["name"]: dataset for dataset in document["datasets"]}
    assert found["digits"]["found"] and not found["cifar10"]["found"] and found["cifar10"]["cure"]
    assert {"name": "ray"}.items() <= next(e for e in document["extras"] if e["name"] == "ray").items()
