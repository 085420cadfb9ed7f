"""`weft simulate`: what it prints, what it writes, what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from weft.planning.cluster import ClusterSpec, Link, write_cluster
from weft.records.record_file import read_record

GIVEN = ("--compute-seconds", "0.01", "--quiet")


def test_simulation_prints_its_result_and_leaves_a_record(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft("simulate", *tiny, "--ranks", "4", "--compute-seconds", "0.01", "--out", "here")
    assert outcome.code == 1, outcome.err
    assert "simulated; times above are virtual" in outcome.out and "FAIL  test/accuracy >= 0.97" in outcome.out
    assert outcome.out.endswith("run folder: here\n")
    assert "seed 0" in outcome.err, "rank 0 shows its progress"
    record = read_record(Path("here"))
    assert record.recipe["mutable"]["plan"] == "data=4" and record.clock_rules.startswith("time is virtual")


def test_show_and_compare_read_a_simulation(weft: Any, tiny: tuple[str, ...]) -> None:
    for name, ranks in (("two", 2), ("four", 4)):
        weft("simulate", *tiny, "--workers", ranks, *GIVEN, "--out", name)
    assert "time is virtual" in weft("show", "two").out
    compared = weft("compare", "two", "four")
    assert compared.code == 0 and "step_time" in compared.out


def test_json_tells_costs_and_counts(weft: Any, tiny: tuple[str, ...]) -> None:
    outcome = weft(
        "simulate", *tiny, "--plan", "data=2 topology=ring", *GIVEN, "--seed", "3", "--repeat", "2", "--json"
    )
    document = outcome.json
    assert (outcome.code, outcome.err, document["accepted"]) == (1, "", False)
    assert [repetition["seed"] for repetition in document["record"]["repetitions"]] == [3, 4]
    facts = document["simulation"]
    assert (facts["ranks"], facts["compute"]["seconds_per_pass"]) == (2, 0.01)
    assert min(facts[key] for key in ("bytes_sent", "messages", "events", "events_per_second", "virtual_seconds")) > 0


def test_a_cluster_file_gives_the_network(weft: Any, tiny: tuple[str, ...]) -> None:
    write_cluster(Path("slow.toml"), ClusterSpec(("a",), 1, Link(1.0, 0.0), Link(1.0, 0.0)))
    weft("simulate", *tiny, "--ranks", "2", *GIVEN, "--cluster", "slow.toml", "--out", "here")
    assert read_record(Path("here")).repetitions[0].values["step_time"] > 1


def test_ranks_wait_for_stragglers_and_the_record_says_how_long(weft: Any, tiny: tuple[str, ...]) -> None:
    slow = weft(
        "simulate", *tiny, "--ranks", "2", *GIVEN, "--stragglers", "rank 1 3x slower", "--out", "slow", "--json"
    )
    shares = slow.json["simulation"]["idle_shares"]
    repetition = read_record(Path("slow")).repetitions[0]
    assert shares[0] > 0.5 > 0.2 > shares[1]
    assert repetition.series["idle_share"] == pytest.approx(shares)
    assert repetition.values["idle_share"] == pytest.approx(sum(shares) / 2)
    assert repetition.values["step_time"] > 0.03
    assert "rank 1 is 3x slower" in weft("show", "slow").out
    shown = weft("simulate", *tiny, "--ranks", "2", *GIVEN, "--out", "even").out
    assert "share of its time that a rank waited" in shown and "rank 1  " in shown


def test_staleness_and_waiting_are_shown_by_rank(weft: Any, tiny: tuple[str, ...]) -> None:
    """The histogram of staleness was in the record alone; the shares of idle time lost their ranks' numbers."""
    plan = ("--plan", "data=3 consistency=async topology=server", *GIVEN)
    outcome = weft("simulate", *tiny, *plan, "--fail", "rank 1 at 0.015 s", "--out", "here")
    assert "updates by their staleness\n  0  " in outcome.out
    assert "\n  rank 1  " in outcome.out and " died\n  rank 2  " in outcome.out
    shown = weft("show", "here").out
    assert "updates by their staleness" in shown and " died\n  rank 2  " in shown
    found = weft("simulate", *tiny, *plan, "--fail", "rank 1 at 0.015 s", "--json").json
    assert found["simulation"]["idle_shares"][1] == "nan"
    assert sum(found["record"]["repetitions"][0]["series"]["staleness"]) > 0


@pytest.mark.parametrize("rank", [0, 3])
def test_a_synchronous_plan_ends_when_a_rank_dies_and_names_it(weft: Any, tiny: tuple[str, ...], rank: int) -> None:
    outcome = weft("simulate", *tiny, "--ranks", "4", *GIVEN, "--fail", f"rank {rank} at 0.02 s", "--out", "here")
    assert outcome.code == 3 and f"rank {rank} is lost" in outcome.err
    repetition = read_record(Path("here")).repetitions[0]
    assert repetition.status == "failed" and f"rank {rank} is lost" in repetition.stop_reason


@pytest.mark.parametrize("consistency", ["local(2)", "gossip(torus)", "elastic(2)"])
def test_relaxed_plans_are_simulated_the_same_way_every_time(
    weft: Any, tiny: tuple[str, ...], consistency: str
) -> None:
    options = ("--plan", f"consistency={consistency}", "--ranks", "4", "--stragglers", "1 in 4 steps 5x slower")
    found = []
    for name in "ab":
        weft("simulate", *tiny, *options, *GIVEN, "--out", name)
        found.append(read_record(Path(name)).repetitions[0])
    assert found[0] == found[1]
    assert found[0].values["consensus_distance"] >= 0


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("digit_mlp",), "did you mean 'digits_mlp'?"),
        (("digits_mlp", "--ranks", "64"), "more ranks than samples in a batch (ranks: 64, batch_size: 32)"),
        (("digits_mlp", "--ranks", "2", "--plan", "data=3"), "plan and workers differ"),
        (("digits_mlp", "--plan", "data=2 topology=neighbours"), "not available in this version"),
        (("digits_mlp", "--cluster", "none.toml"), "run weft cluster probe"),
        (("digits_mlp", "--compute-seconds", "-1"), "Invalid value for '--compute-seconds'"),
        (("digits_mlp", "--ranks", "2", "--stragglers", "often"), "write '1 in 20 steps 5x slower'"),
        (("digits_mlp", "--ranks", "2", "--stragglers", "rank 2 5x slower"), "no such rank can be slow"),
        (("digits_mlp", "--ranks", "2", "--fail", "rank 2 at 1 s"), "no such rank can fail"),
    ],
)
def test_bad_input_is_2_and_leaves_no_folder(weft: Any, tmp_path: Path, line: tuple[str, ...], text: str) -> None:
    outcome = weft("simulate", *line)
    assert (outcome.code, outcome.out) == (2, "")
    assert text in outcome.err
    assert list(tmp_path.iterdir()) == []
