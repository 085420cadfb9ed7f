"""The benchmark of compression: its cases, its commands and its ratios."""

from typing import Any

import pytest

from benchmarks.compression.__main__ import commands_of, target_row
from benchmarks.compression.cases import PEERS, Hook, parse_hook, rows_of


def found(*seconds: float, sent: int = 0) -> dict[str, Any]:
    return {"seconds": list(seconds), "sent": sent, "received": 0}


def test_hooks_are_named_and_plans_are_not_taken_for_them() -> None:
    assert parse_hook("ddp_batched_powersgd(2)") == Hook("batched_powersgd", 2)
    assert parse_hook("data=4 compress=powersgd(2)") is None
    assert parse_hook("free") is None
    assert all(parse_hook(case) for case in PEERS if case != "free")
    with pytest.raises(ValueError, match="unknown hook"):
        parse_hook("ddp_fp17")


def test_ratios_are_those_of_medians() -> None:
    rounds = {
        "free": [found(*[1.0] * 5)],
        "ddp": [found(8.0, 9.0, 10.0, sent=3_000_000), found(8.0, 9.0, 90.0, sent=6_000_000)],
        "ddp_fp16": [found(5.0)],
        "ddp_powersgd(1)": [found(3.0)],
        "data=4 compress=topk(0.01)": [found(*[1.5] * 5)],
    }
    rows = {row["case"]: row for row in rows_of("mlp", "1gbit", rounds)}
    plan = rows["data=4 compress=topk(0.01)"]
    assert (rows["ddp"]["seconds per step"], rows["ddp"]["MB sent"]) == (9.0, 1.5)
    assert plan["times as fast as DDP"] == 6.0 and (plan["workload"], plan["link"]) == ("mlp", "1gbit")
    assert plan["share of free communication"] == pytest.approx(6.0 / 9.0)
    assert plan["interval_of_share of free communication"] == [pytest.approx(6.0 / 9.0)] * 2
    assert plan["times as fast as the best hook"] == 2.0
    assert plan["interval_of_times as fast as the best hook"] is None, "one step of the other is too few"
    assert rows["ddp"]["raw_rounds"] == rounds["ddp"]


def test_ratios_to_what_was_not_measured_are_left_out() -> None:
    (row,) = rows_of("mlp", "1gbit", {"data=4": [found(2.0)]})
    assert (row["times as fast as DDP"], row["times as fast as the best hook"]) == (None, None)


@pytest.mark.parametrize(("is_there", "steps", "samples"), [(True, 50, 1600), (False, None, None)])
def test_a_target_that_was_not_reached_has_no_steps(is_there: bool, steps: int | None, samples: int | None) -> None:
    trained = {"is_there": is_there, "steps": 50, "accuracy": 0.8, "curve": [(50, 1.0, 0.8)], "of_ranks": [{}] * 3}
    row = target_row({"case": "ddp"}, 0.85, trained)
    assert (row["steps"], row["samples"], row["accuracy then"]) == (steps, samples, 0.8)


def test_plans_run_by_weft_launch_and_peers_as_torchrun_starts_them() -> None:
    plan = commands_of("data=2", "10.0.0.1", 29500, 2, [])
    assert all("--rendezvous" in command and command[command.index("--plan") + 1] == "data=2" for command in plan)
    assert [command[command.index("--host-rank") + 1] for command in plan] == ["0", "1"]
    assert [command[:2] for command in commands_of("ddp", "10.0.0.1", 29500, 2, [])] == [
        ["env", "RANK=0"],
        ["env", "RANK=1"],
    ]
