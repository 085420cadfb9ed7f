"""Metrics and acceptance rules: each has a direction, and a value that is no number is never accepted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RecipeError
from weft.metrics.metric import METRICS, Rule, find_metric


@pytest.mark.parametrize(("name", "plain"), [("accuracy", "accuracy"), ("test/accuracy", "accuracy")])
def test_a_split_may_stand_in_front(name: str, plain: str) -> None:
    assert find_metric(name) is METRICS[plain]


@pytest.mark.parametrize(
    ("name", "cure"), [("acuracy", "did you mean 'accuracy'?"), ("test/los", "'loss'"), ("zz", "known: ")]
)
def test_an_unknown_metric_names_the_nearest(name: str, cure: str) -> None:
    with pytest.raises(RecipeError, match="unknown metric") as caught:
        find_metric(name)
    assert cure in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "than", "better"),
    [
        ("accuracy", 0.9, 0.8, True),
        ("accuracy", 0.8, 0.9, False),
        ("loss", 0.8, 0.9, True),
        ("loss", 0.9, 0.9, False),
        ("sampler_order", 0.0, 1.0, False),
        ("sampler_order", 1.0, 0.0, False),
    ],
)
def test_better_follows_the_direction(name: str, value: float, than: float, better: bool) -> None:
    assert METRICS[name].is_better(value, than) is better


def test_a_rule_can_ask_for_less() -> None:
    # Deep500's recipes accepted a result unless it was below its bound, so a loss or a time could never fail.
    rule = Rule("test/loss", 0.5)
    assert rule.accepts(0.5) and not rule.accepts(0.51)
    assert Rule("test/accuracy", 0.5).accepts(0.5) and not Rule("test/accuracy", 0.5).accepts(0.49)


@pytest.mark.parametrize("name", ["test/accuracy", "test/loss", "time_to_target"])
def test_what_is_not_a_number_is_never_accepted(name: str) -> None:
    assert not Rule(name, 0.5).accepts(math.nan)


def test_a_failure_as_infinity_is_never_accepted_as_a_time() -> None:
    assert not Rule("time_to_target", 60).accepts(math.inf)


def test_a_fact_cannot_be_a_rule() -> None:
    with pytest.raises(RecipeError, match="no better and worse"):
        Rule("sampler_order", 0.5)


def test_a_rule_reads_as_it_is_meant() -> None:
    assert str(Rule("test/accuracy", 0.97)) == "test/accuracy >= 0.97"
    assert str(Rule("wall_clock", 60)) == "wall_clock <= 60"


DIRECTED = [name for name, metric in METRICS.items() if metric.direction != "neither"]


@given(st.sampled_from(DIRECTED), st.floats(allow_nan=False), st.floats())
def test_what_beats_an_accepted_value_is_accepted(name: str, bound: float, value: float) -> None:
    rule = Rule(name, bound)
    assert rule.accepts(bound)
    if METRICS[name].is_better(value, bound):
        assert rule.accepts(value)
