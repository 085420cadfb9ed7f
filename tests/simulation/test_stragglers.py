"""Slow and failing ranks in words: what the words mean, what is refused, and that draws depend on their key alone."""

from pathlib import Path
from statistics import fmean

import pytest

from weft.distributed.group import Kill
from weft.errors import RunFolderError, UsageError
from weft.metrics.measure import Measurements
from weft.simulation.stragglers import Drawn, Occasional, Slow, check_ranks, parse_failures, parse_stragglers, slowness


def test_words_mean_what_they_say() -> None:
    text = "1 in 20 steps 5x slower, rank 3 1.5x slower"
    assert parse_stragglers(text) == (Occasional(0.05, 5.0), Slow(3, 1.5))
    assert parse_stragglers("1 in 1 step 2x slower") == (Occasional(1.0, 2.0),)
    assert parse_failures("rank 3 at 40 s, rank 0 at 0.5s", 4) == (
        Kill(3, after_seconds=40.0),
        Kill(0, after_seconds=0.5),
    )


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "not understood"),
        ("5x slower", "not understood"),
        ("1 in 20 steps", "not understood"),
        ("1 in 20 steps 5x faster", "not understood"),
        ("1 in 20 steps -5x slower", "not understood"),
        ("rank three 2x slower", "not understood"),
        ("rank 1 2x slower,", "not understood"),
        ("21 in 20 steps 5x slower", "more slow steps than steps"),
        ("0 in 20 steps 5x slower", "or none"),
        ("rank 1 0.5x slower", "faster than the others"),
        ("steps from absent.txt", "could not be read"),
    ],
)
def test_other_words_are_refused_with_a_cure(text: str, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        parse_stragglers(text)


@pytest.mark.parametrize(
    ("text", "fact"),
    [("rank 3", "not understood"), ("rank 3 at noon", "not understood"), ("rank 4 at 1 s", "no such rank can fail")],
)
def test_a_failure_that_cannot_be_is_refused(text: str, fact: str) -> None:
    with pytest.raises(UsageError, match=fact):
        parse_failures(text, 4)


def test_a_straggler_that_is_no_rank_is_refused() -> None:
    check_ranks((Slow(3, 2.0), Occasional(0.5, 2.0)), 4)
    with pytest.raises(UsageError, match="no such rank can be slow"):
        check_ranks((Slow(4, 2.0),), 4)
    with pytest.raises(UsageError, match="no such rank can be slow"):
        check_ranks((Drawn((1.0,)), Drawn((1.0,), rank=4)), 4)


def test_slow_steps_are_as_frequent_as_asked_and_the_same_every_time() -> None:
    stragglers = parse_stragglers("1 in 4 steps 5x slower")
    keys = [(seed, rank, step) for seed in range(2) for rank in range(20) for step in range(50)]
    drawn = [slowness(stragglers, *key) for key in keys]
    assert set(drawn) == {1.0, 5.0}
    assert fmean(factor == 5.0 for factor in drawn) == pytest.approx(0.25, abs=0.03)
    assert drawn == [slowness(stragglers, *key) for key in keys]
    assert [slowness(stragglers, 0, 0, step) for step in range(50)] != [
        slowness(stragglers, 1, 0, step) for step in range(50)
    ]


def test_stragglers_are_multiplied_and_draw_for_themselves() -> None:
    both = parse_stragglers("1 in 2 steps 2x slower, 1 in 2 steps 3x slower, rank 1 5x slower")
    assert {slowness(both, 0, 0, step) for step in range(50)} == {1.0, 2.0, 3.0, 6.0}
    assert {slowness(both, 0, 1, step) for step in range(50)} == {5.0, 10.0, 15.0, 30.0}
    assert slowness((), 0, 0, 0) == 1.0


def test_steps_of_a_file_are_taken_over_their_median(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("# seconds\n0.2\n0.1\n\n0.4\n")
    (found,) = parse_stragglers(f"steps from {tmp_path / 'steps.txt'}")
    assert found == Drawn((1.0, 0.5, 2.0))
    assert {slowness((found,), 0, 0, step) for step in range(50)} == {0.5, 1.0, 2.0}


def test_a_rank_can_have_a_distribution_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("0.2\n0.1\n0.4\n")
    own = parse_stragglers(f"rank 1 steps from {tmp_path / 'steps.txt'}, rank 1 2x slower")
    assert own[0] == Drawn((1.0, 0.5, 2.0), rank=1) and "steps of rank 1" in str(own[0])
    assert {slowness(own, 0, 1, step) for step in range(50)} == {1.0, 2.0, 4.0}
    assert {slowness(own, 0, 0, step) for step in range(50)} == {1.0}


@pytest.mark.parametrize("text", ["", "fast", "1.0\n-1.0", "nan", "0"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "steps.txt").write_text(text)
    with pytest.raises(UsageError, match="one number"):
        parse_stragglers(f"steps from {tmp_path / 'steps.txt'}")


def test_steps_of_a_run_are_taken_from_its_record(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        parse_stragglers(f"steps from {tmp_path}")
    measurements = Measurements("mine")
    for _ in measurements.measured([1, 2, 3], "train"):
        pass
    measurements.save(tmp_path / "run")
    with pytest.raises(UsageError, match="no seconds of steps"):  # a loop of one's own names its series otherwise
        parse_stragglers(f"steps from {tmp_path / 'run'}")
