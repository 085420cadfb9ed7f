"""Ranks that gossip over the mailbox as real processes: deaths by kill -9, and replays to the last bit."""

from pathlib import Path

import pytest

from tests.processes.test_served import finish, kill_when_under_way, start
from weft.distributed.consistency.pairs import read_journals
from weft.planning.gossip_graphs import make_split
from weft.proving.audit import audit_pairs
from weft.records.record_file import read_record

PLAN = "data={} consistency=gossip(ring,{})"
SETTINGS = ["--set", "epochs=3", "--set", "batch_size=32", "--quiet", "--out"]


@pytest.mark.slow
def test_a_run_of_four_processes_two_of_which_are_killed_is_replayed_to_the_last_bit(tmp_path: Path) -> None:
    """Rank 1 answers, rank 2 asks."""
    run = tmp_path / "run"
    process = start("run", "digits_mlp", "--plan", PLAN.format(4, "mix=pair"), *SETTINGS, str(run))
    kill_when_under_way(process, run, 1)
    kill_when_under_way(process, run, 2)
    finish(process)
    repetition = read_record(run).repetitions[0]
    assert (repetition.status, repetition.values["lost_ranks"]) == ("done", 2)
    assert audit_pairs(read_journals(run, 0, 4), make_split("ring", 4)) == []
    told = finish(start("run", "--replay", str(run), "--quiet", "--out", str(tmp_path / "again")))
    assert "to the last bit" in told


@pytest.mark.slow
def test_ranks_that_mix_with_all_neighbours_go_on_without_one_that_is_killed(tmp_path: Path) -> None:
    """And virtual ranks replay what the others did."""
    run = tmp_path / "run"
    process = start("run", "digits_mlp", "--plan", PLAN.format(3, "lost=drop"), *SETTINGS, str(run))
    kill_when_under_way(process, run, 1)
    finish(process)
    repetition = read_record(run).repetitions[0]
    assert (repetition.status, repetition.values["lost_ranks"]) == ("done", 1)
    virtual = start(
        "simulate", "--replay", str(run), "--compute-seconds", "0.001", "--quiet", "--out", str(tmp_path / "v")
    )
    assert "to the last bit" in finish(virtual)
