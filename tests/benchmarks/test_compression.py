"""The benchmark of compression: its cases, its commands and its ratios."""

from typing import Any

import pytest

from benchmarks.compression.__main__ import commands_of
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
        "free": [found(1.0, 1.0)],
        "ddp": [found(8.0, 9.0, 10.0, sent=300), found(8.0, 9.0, 90.0, sent=600)],
        "ddp_fp16": [found(5.0)],
        "ddp_powersgd(1)": [found(3.0)],
        "data=4 compress=topk(0.01)": [found(1.5)],
    }
    rows = {row["case"]: row for row in rows_of(rounds)}
    plan = rows["data=4 compress=topk(0.01)"]
    assert (rows["ddp"]["seconds_per_step"], rows["ddp"]["sent_bytes_per_step"]) == (9.0, 150.0)
    assert plan["times_faster_than_ddp"] == 6.0
    assert plan["share_of_free_communication"] == pytest.approx(6.0 / 9.0)
    assert plan["times_faster_than_best_hook"] == 2.0
    assert rows["ddp"]["raw"] == rounds["ddp"]


def test_ratios_to_what_was_not_measured_are_left_out() -> None:
    (row,) = rows_of({"data=4": [found(2.0)]})
    assert (row["times_faster_than_ddp"], row["times_faster_than_best_hook"]) == (None, None)


def test_plans_run_by_weft_launch_and_peers_as_torchrun_starts_them() -> None:
    plan = commands_of("data=2", "10.0.0.1", 29500, 2, [])
    assert all("--rendezvous" in command and command[command.index("--plan") + 1] == "data=2" for command in plan)
    assert [command[command.index("--host-rank") + 1] for command in plan] == ["0", "1"]
    assert [command[:2] for command in commands_of("ddp", "10.0.0.1", 29500, 2, [])] == [
        ["env", "RANK=0"],
        ["env", "RANK=1"],
    ]
