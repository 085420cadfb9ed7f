"""Rules by hand: which one fits a name, and what is refused."""

import pytest

from weft.distributed.placement.rules import Rules
from weft.errors import PlanError


def test_the_first_rule_that_fits_counts() -> None:
    rules = Rules((("features.0", "data"), ("features.*", "space"), ("classifier", "split")))
    found = [rules.word_of(name) for name in ("features.0", "features.0.conv", "features.3", "classifier.1", "head")]
    assert found == ["data", "data", "space", "split", None]


def test_words_are_those_of_axes_that_are_split() -> None:
    rules = Rules((("a", "split"), ("b", "space")))
    rules.check_words({"linear": {"data", "split"}, "tensor": {"space"}})
    rules.check_words({})  # a plan without such axes has no use for them
    with pytest.raises(PlanError, match=r"unknown word of a rule \(b: space, axes: linear\)"):
        rules.check_words({"linear": {"data", "split"}})


def test_a_rule_that_fits_nothing_is_refused() -> None:
    rules = Rules((("fc*", "split"), ("head", "data")))
    rules.check_names("split", ["conv", "fc1"])
    with pytest.raises(PlanError, match=r"\(fc\*: split\)"):
        rules.check_names("split", ["conv"])
