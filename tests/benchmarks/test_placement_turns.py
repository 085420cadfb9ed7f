"""The parts that benchmarks of placement share: turns, the slowest rank, ratios, the result file."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.placement import pipeline, sharded, tensor
from benchmarks.placement.turns import report, slowest, take_turns, times_as_fast
from weft.distributed.group import SoloGroup


def test_another_system_is_first_in_every_round_and_one_step_of_a_turn_is_not_timed() -> None:
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    turns: list[str] = []
    values = take_turns(SoloGroup(), steps, 3, num_steps=2, after_turn=turns.append)
    assert turns == list("abcbcacab")
    assert order == [name for name in turns for _ in range(3)]
    assert {name: len(own) for name, own in values.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_slowest_rank_counts_in_each_round() -> None:
    assert slowest([{"a": [1.0, 4.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 4.0]}


def test_a_ratio_is_taken_within_rounds() -> None:
    """A phase in which the machine is slow is in both."""
    found = times_as_fast([2.0, 20.0, 2.2, 22.0, 2.0, 2.1], [1.0, 10.0, 1.1, 11.0, 1.0, 1.05], bar=1.3)
    assert (found["ratio"], found["interval"], found["bar"]) == (2.0, [2.0, 2.0], 1.3)


def test_the_command_writes_what_it_has_shown(tmp_path: Path) -> None:
    def measure(num_rounds: int, options: argparse.Namespace) -> list[dict[str, Any]]:
        return [{"rounds": num_rounds, "ranks": n} for n in options.ranks]

    shown: list[dict[str, Any]] = []
    out = tmp_path / "found.json"
    report(
        "A title.", "found", measure, shown.append, ["--rounds", "2", "--ranks", "2", "4", "--out", str(out)], ranks=2
    )
    written = json.loads(out.read_text())
    assert written["rows"] == shown == [{"rounds": 6, "ranks": 2}, {"rounds": 6, "ranks": 4}]
    assert {"date", "machine", "versions", "load_before"} <= written.keys()


def test_the_efficiency_of_a_pipeline_is_a_share_of_the_filled_one() -> None:
    """One rank takes 16, so two stages of 8 take 9 with 8 micro-batches; 10 are 0.9 of that."""
    values = {"one rank": [16.0] * 6, "stages that never talk": [8.0] * 6}
    values |= {name: [10.0] * 6 for name in (*pipeline.SCHEDULES, *pipeline.PEERS)}
    row = pipeline.row_of([values, values])
    assert row["efficiency, weft"]["ratio"] == row["share of two busy cores, weft"]["ratio"] == pytest.approx(0.9)


def test_rows_of_layers_and_shards_name_their_peers() -> None:
    values = {"weft": [1.0] * 6, "DTensor over gloo": [2.0] * 6, "DTensor over weft": [1.5] * 6}
    row = tensor.row_of("mlp", [values, values])
    assert (row["DTensor over gloo / weft"]["ratio"], row["DTensor over weft / weft"]["ratio"]) == (2.0, 1.5)
    names = ["weft level 3", *(sharded.peer_name(backend, reshards=True) for backend in sharded.PEERS)]
    held = {name: {"parameters": 50, "gradients": 50, "state": 100} for name in names}
    rank = {"values": {name: [1.0] * 6 for name in names}, "held": held, "parameters": 100}
    found = sharded.row_of(3, [rank, rank])
    assert found["live_over_formula"] == 1.0 and found["FSDP2 over gloo / weft"]["ratio"] == 1.0
