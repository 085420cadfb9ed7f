"""The examples of operators pass their own checks."""

from pathlib import Path

import pytest
import torch

from weft.operators import Operator
from weft.operators.check import check_operator
from weft.operators.operator import load_operators

EXAMPLES = Path(__file__).parents[2] / "examples" / "operators"


def load(name: str) -> Operator:
    (operator,) = load_operators(EXAMPLES / name)
    return operator


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_passes_every_check(name: str) -> None:
    assert [finding for finding in check_operator(load(name)) if not finding.passed] == []


def test_swish_is_silu() -> None:
    x = torch.randn(3, 5)
    torch.testing.assert_close(load("swish.py")(x), torch.nn.functional.silu(x))


def test_normalise_is_layer_norm() -> None:
    x, gain = torch.randn(3, 5), torch.randn(5)
    torch.testing.assert_close(load("normalise.py")(x, gain)[0], torch.nn.functional.layer_norm(x, (5,), gain))
