"""Operators of a file."""

from pathlib import Path

import pytest
import torch

from weft.errors import UsageError
from weft.operators.operator import load_operators

SOURCE = """
from torch import Tensor
from weft.operators import operator

class Double:
    def forward(self, x: Tensor) -> Tensor:
        return {factor} * x

second = operator(Double, name="{space}::second")
first = operator(Double, name="{space}::first")
again = first
"""


def test_operators_in_the_order_of_the_file_each_once(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE.format(factor=2, space="file"))
    assert [found.name for found in load_operators(tmp_path / "a.py")] == ["file::second", "file::first"]


def test_a_file_may_be_changed_and_read_again(tmp_path: Path) -> None:
    for factor in (2, 3):
        (tmp_path / "a.py").write_text(SOURCE.format(factor=factor, space="changed") + "#" * factor)
        assert load_operators(tmp_path / "a.py")[0](torch.ones(1)) == factor


@pytest.mark.parametrize(
    ("name", "cure"), [("absent.py", "no such file"), ("empty.py", "no operators"), ("a.txt", "py")]
)
def test_a_file_without_operators_is_refused(tmp_path: Path, name: str, cure: str) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "a.txt").write_text("x = 1")
    with pytest.raises(UsageError, match=cure):
        load_operators(tmp_path / name)
