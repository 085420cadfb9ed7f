"""Ranks that gossip over the mailbox as real processes: deaths by kill -9, and replays to the last bit."""

from pathlib import Path

import pytest

from tests.command_line import Weft
from tests.processes.killing import use_killer
from weft.distributed.consistency.pairs import read_journals
from weft.planning.gossip_graphs import make_split
from weft.proving.audit import audit_pairs
from weft.records.record_file import read_record

PLAN = "data={} consistency=gossip(ring,{})"
SETTINGS = ["--set", "epochs=3", "--set", "batch_size=32", "--quiet", "--out"]


@pytest.mark.slow
def test_a_run_of_four_processes_two_of_which_are_killed_is_replayed_to_the_last_bit(
    weft: Weft, tmp_path: Path
) -> None:
    """Rank 1 answers, rank 2 asks."""
    run = tmp_path / "run"
    with use_killer(run, 1, 2):
        weft("run", "digits_mlp", "--plan", PLAN.format(4, "mix=pair"), *SETTINGS, run)
    repetition = read_record(run).repetitions[0]
    assert (repetition.status, repetition.values["lost_ranks"]) == ("done", 2)
    assert audit_pairs(read_journals(run, 0, 4), make_split("ring", 4)) == []
    assert "to the last bit" in weft("run", "--replay", run, "--quiet", "--out", tmp_path / "again").err


@pytest.mark.slow
def test_ranks_that_mix_with_all_neighbours_go_on_without_one_that_is_killed(weft: Weft, tmp_path: Path) -> None:
    """And virtual ranks replay what the others did."""
    run = tmp_path / "run"
    with use_killer(run, 1):
        weft("run", "digits_mlp", "--plan", PLAN.format(3, "lost=drop"), *SETTINGS, run)
    repetition = read_record(run).repetitions[0]
    assert (repetition.status, repetition.values["lost_ranks"]) == ("done", 1)
    told = weft("simulate", "--replay", run, "--compute-seconds", "0.001", "--quiet", "--out", tmp_path / "virtual")
    assert "to the last bit" in told.err
