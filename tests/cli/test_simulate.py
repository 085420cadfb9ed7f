"""`weft simulate`: what it prints, what it writes, what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from weft.metrics.record_file import read_record
from weft.planning import ClusterSpec, Link, write_cluster

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


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (("digit_mlp",), "did you mean 'digits_mlp'?"),
        (("digits_mlp", "--ranks", "64"), "more ranks than samples in a batch (ranks: 64, batch_size: 32)"),
        (("digits_mlp", "--ranks", "2", "--plan", "data=3"), "plan and workers differ"),
        (("digits_mlp", "--plan", "pipeline=2"), "not available in this version"),
        (("digits_mlp", "--cluster", "none.toml"), "run weft cluster probe"),
        (("digits_mlp", "--compute-seconds", "-1"), "Invalid value for '--compute-seconds'"),
    ],
)
def test_bad_input_is_2_and_leaves_no_folder(weft: Any, tmp_path: Path, line: tuple[str, ...], text: str) -> None:
    outcome = weft("simulate", *line)
    assert (outcome.code, outcome.out) == (2, "")
    assert text in outcome.err
    assert list(tmp_path.iterdir()) == []
