"""The numbers of a repetition, and the judgement over all of them."""

import math
from dataclasses import replace

import pytest
import torch

from weft.metrics.metric import Rule
from weft.records.record import Evaluation, Repetition, RunRecord
from weft.training.history import History
from weft.training.replicas import Traffic
from weft.training.results import hash_tensors, judge, to_target, values_of

TARGET = Rule("accuracy", 0.9)


def evaluation(step: int, accuracy: float) -> Evaluation:
    return Evaluation(step, 10 * step, step / 2, 3.0 * step, {"validation/accuracy": accuracy})


def record_of(*values: dict[str, float]) -> RunRecord:
    repetitions = tuple(Repetition(seed, "done", "", "", values=v) for seed, v in enumerate(values))
    return RunRecord("x", {}, "", "", "", {}, {}, {}, repetitions)


def test_to_target_is_the_first_evaluation_that_met_it() -> None:
    evaluations = [evaluation(1, 0.5), evaluation(2, math.nan), evaluation(3, 0.9), evaluation(4, 0.99)]
    assert to_target(evaluations, TARGET) == {
        "time_to_target": 9.0,
        "epochs_to_target": 1.5,
        "samples_to_target": 30,
    }


def test_a_target_that_was_not_met_is_infinitely_far() -> None:
    for evaluations in ([], [evaluation(1, 0.5)]):
        assert set(to_target(evaluations, TARGET).values()) == {math.inf}
    assert to_target([evaluation(1, 0.99)], None) == {}


def test_values_of_a_repetition() -> None:
    history = History([evaluation(1, 0.5), evaluation(2, 0.95)], [1.0, 0.5, 0.2], [1.0, 2.0, 4.0], [8, 8, 4])
    values = values_of(history, TARGET, 20.0, {"test/accuracy": 0.93})
    assert values == {
        "validation/accuracy": 0.95,
        "test/accuracy": 0.93,
        "time_to_target": 6.0,
        "epochs_to_target": 1.0,
        "samples_to_target": 20,
        "wall_clock": 20.0,
        "throughput": 4.0,
        "step_time": 2.0,
    }


def test_traffic_of_every_step_is_a_median_and_that_of_some_steps_a_mean() -> None:
    # Regression: replicas that meet in every fourth step would have sent nothing in the median step.
    every, some = [Traffic(1.0, 0.0, 8), Traffic(2.0, 0.0, 8), Traffic(9.0, 0.0, 8)], [Traffic()] * 3
    names = ("communication_exposed", "bytes_per_step")

    def found(traffic: list[Traffic]) -> list[float]:
        values = values_of(History(step_traffic=traffic), None, 1.0, {})
        return [values[name] for name in names]

    assert found(every) == [2.0, 8.0]
    assert found([*some, Traffic(4.0, 0.0, 80)]) == [1.0, 20.0]


def test_compression_is_reported_where_something_was_sent_instead_of_tensors() -> None:
    coded = Traffic(1.0, 0.0, 10, coding=0.25, under_way=0.5, dense_bytes=800, payload_bytes=8, wire_bytes=24)
    names = ("payload_ratio", "wire_bytes_per_step", "communication_time", "compression_time")

    def found(*traffic: Traffic) -> list[float | None]:
        values = values_of(History(step_traffic=list(traffic)), None, 1.0, {})
        return [values.get(name) for name in names]

    assert found(coded, coded) == [100.0, 24.0, 0.5, 0.25]
    assert found(coded, Traffic()) == [100.0, 12.0, 0.25, 0.125], "ranks that meet seldom"
    assert found(replace(coded, coding=0.0)) == [100.0, 24.0, 0.5, None], "virtual ranks encode in no time"
    assert found(Traffic(1.0, 0.0, 8, wire_bytes=8)) == [None] * 4, "nothing is encoded"


def test_values_without_a_step_or_a_clock_that_moved() -> None:
    assert values_of(History(), None, 1.0, {}) == {"wall_clock": 1.0}
    frozen = values_of(History(step_seconds=[0.0], step_samples=[4]), None, 1.0, {})
    assert "throughput" not in frozen


@pytest.mark.parametrize(
    ("values", "median", "passed"),
    [
        ([0.98], 0.98, True),
        ([0.96], 0.96, False),
        ([0.96, 0.98, 0.99], 0.98, True),
        ([0.99, 0.96, 0.95], 0.96, False),
        ([0.96, 1.0], 0.98, True),
        ([None, 0.99, 0.99], 0.99, True),
        ([None, None, 0.99], -math.inf, False),
        # Python's median of numbers that cannot be ordered depends on where they stand.
        ([math.nan, 0.99, 0.99], 0.99, True),
        ([math.nan, 0.99, math.nan], -math.inf, False),
        ([0.99, math.nan, math.nan], -math.inf, False),
        ([math.nan, math.nan, 0.99], -math.inf, False),
    ],
    ids=str,
)
def test_a_rule_is_held_against_the_median(values: list[float | None], median: float, passed: bool) -> None:
    record = record_of(*({} if value is None else {"test/accuracy": value} for value in values))
    (verdict,) = judge([Rule("test/accuracy", 0.97)], record)
    assert (verdict.rule, verdict.value, verdict.passed) == ("test/accuracy >= 0.97", median, passed)


def test_a_missing_loss_is_the_worst_loss() -> None:
    rules = [Rule("test/loss", 0.1), Rule("test/accuracy", 0.5)]
    verdicts = judge(rules, record_of({"test/loss": 0.05, "test/accuracy": 0.6}, {}, {}))
    assert [(verdict.value, verdict.passed) for verdict in verdicts] == [(math.inf, False), (-math.inf, False)]
    assert judge([], record_of({})) == ()


TENSORS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[1, 2]])}


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.tensor([1.0, 2.0000002])},
        {"a": torch.tensor([2.0, 1.0])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"b": torch.tensor([[1], [2]])},
        {"b": torch.tensor([1, 2])},
        {"c": torch.empty(0)},
    ],
    ids=str,
)
def test_hash_sees_any_change(changed: dict[str, torch.Tensor]) -> None:
    assert hash_tensors({**TENSORS, **changed}) != hash_tensors(TENSORS)


def test_hash_sees_bits_not_memory() -> None:
    assert hash_tensors(dict(reversed(TENSORS.items()))) == hash_tensors(TENSORS)
    turned = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t()
    assert hash_tensors({"x": turned}) == hash_tensors({"x": turned.contiguous()})
    assert hash_tensors({"x": torch.nn.Parameter(turned)}) == hash_tensors({"x": turned})
    assert hash_tensors({"x": torch.tensor(0.0)}) != hash_tensors({"x": torch.tensor(-0.0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.float64], ids=str)
def test_hash_of_every_type(dtype: torch.dtype) -> None:
    hashes = {hash_tensors({"x": torch.tensor(value).to(dtype)}) for value in (0, 1)}
    assert len(hashes) == 2 and hash_tensors({"x": torch.empty(0, 3, dtype=dtype)})


def test_judging_changes_no_record() -> None:
    record = record_of({"test/accuracy": 0.99})
    judge([Rule("test/accuracy", 0.97)], record)
    assert record == replace(record)
