"""Shares of idle time: every rank by its number, of many the ends and the quartiles, and the dead by name."""

import math

from weft.records.record import Repetition
from weft.report.waiting import idle_rows, idle_shares


def test_few_ranks_are_shown_by_their_numbers() -> None:
    """Rank 2 was shown as rank 1 when that had died."""
    assert idle_rows([0.1, math.nan, 0.3]) == [("rank 0", "10.0%"), ("rank 1", "died"), ("rank 2", "30.0%")]


def test_of_many_ranks_the_ends_and_quartiles_are_shown() -> None:
    shares = [(rank * 7 % 64) / 63 for rank in range(64)]
    shares[5], shares[9] = math.nan, math.nan
    rows = idle_rows(shares)
    assert [name for name, _ in rows] == [
        *("rank 0", "rank 55"),
        *("quartile", "median", "quartile"),
        *("rank 27", "rank 18"),
        "died",
    ]
    assert (rows[0][1], rows[-2][1], rows[-1][1]) == ("0.0%", "98.4%", "ranks 5, 9")


def test_of_many_ranks_of_which_few_live_all_the_living_are_shown() -> None:
    rows = idle_rows([0.2, 0.1, *[math.nan] * 8])
    assert [name for name, _ in rows] == ["rank 1", "rank 0", "died"]


def test_shares_are_means_over_trainings() -> None:
    trainings = [Repetition(seed, "done", "", "", series={"idle_share": (0.25 * seed, math.nan)}) for seed in (0, 1)]
    shares = idle_shares([*trainings, Repetition(2, "failed", "", "")])
    assert shares[0] == 0.125 and math.isnan(shares[1])
    assert idle_shares([]) == []
