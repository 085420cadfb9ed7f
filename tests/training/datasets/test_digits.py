"""The digits are those of scikit-learn, whichever way they are read."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from weft.training.datasets.digits import _read_rows


@pytest.mark.parametrize("has_file", [True, False], ids=["from its file", "by the package"])
def test_rows_are_those_of_the_package(has_file: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_file:
        monkeypatch.setattr(Path, "exists", lambda _: False)
    pixels, classes = load_digits(return_X_y=True)
    rows = _read_rows()
    assert np.array_equal(rows[:, :-1], pixels)
    assert np.array_equal(rows[:, -1], classes)
