"""The harness of the training-step benchmark: what it computes from times, and that its ranks answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.steps.cases import CASES, loss_of
from benchmarks.steps.rank import time_steps
from benchmarks.steps.ranks import RankError, Ranks, Times
from benchmarks.training_step import CEILING, KEPT, MIN_ROUNDS, measure, rows_of
from benchmarks.weave_overhead import measure as measure_overhead
from benchmarks.weave_overhead import row_of


def test_shares_are_medians_over_rounds() -> None:
    drift = [1.0, 2.0, 1.5, 3.0, 1.0, 2.5]
    factors = {CEILING: 1.0, KEPT: 0.5, "weft": 1.25}
    values = {system: [Times(factor * x, factor * x / 2) for x in drift] for system, factor in factors.items()}
    row = rows_of("mlp", values)[2]
    assert (row["share_of_ceiling"], row["interval_of_share"]) == (0.8, [0.8, 0.8])
    assert row["share_of_ceiling_memory_kept"] == 0.4
    assert row["ms_per_step"] == pytest.approx(1250 * 1.75)
    assert (row["raw_ms"][0], row["raw_cpu_ms"][0]) == (1250.0, 625.0)


def test_every_system_has_a_turn_in_every_round_and_one_that_fails_is_left_out() -> None:
    def fail() -> Times:
        raise RankError("no such thing")

    once = Times(1.0, 1.0)
    values = measure({CEILING: lambda: once, "weft": lambda: once, "broken": fail}, seconds=0.0)
    assert {name: len(times) for name, times in values.items()} == {CEILING: MIN_ROUNDS, "weft": MIN_ROUNDS}


def test_the_first_and_the_last_step_of_a_turn_are_not_timed() -> None:
    made: list[int] = []

    def steps() -> Iterator[None]:
        while True:
            made.append(1)
            yield

    assert time_steps(steps(), 3).keys() == {"wall", "cpu"}
    assert len(made) == 5


@pytest.mark.parametrize("name", ["small mlp", "resnet20", "gpt"])
def test_a_case_gives_a_loss(name: str) -> None:
    inputs, targets = CASES[name].make_dataset()[:2]
    assert loss_of(CASES[name].make_model()(inputs), targets).isfinite()


@pytest.mark.slow
def test_ranks_train_and_say_why_they_cannot(tmp_path: Path) -> None:
    ranks = Ranks("weft", 2, tmp_path / "weft")
    try:
        ranks.load("small mlp")
        assert ranks.run(2).wall > 0.0
        with pytest.raises(RankError, match="no such case"):
            ranks.load("no such case")
        with pytest.raises(RankError, match="ended"):
            ranks.run(1)
    finally:
        ranks.close()


def test_the_overhead_of_one_process_is_a_ratio_of_pairs() -> None:
    row = row_of("small mlp", measure_overhead("small mlp", num_pairs=6, num_steps=1))
    assert row["num_pairs"] == 6
    assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    assert not row_of("x", {"weft": [1.03] * 6, "plain": [1.0] * 6})["is_below_bar"]
    assert row_of("x", {"weft": [1.01] * 6, "plain": [1.0] * 6})["is_below_bar"]
