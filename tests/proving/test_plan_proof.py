"""Proofs from the command line, on real processes."""

import subprocess
import sys

import pytest

PAIRS = "data=4 consistency=gossip(ring,mix=pair)"


def prove(plan: str) -> str:
    command = [sys.executable, "-m", "weft", "prove", "digits_mlp", "--plan", plan, "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_plan_with_servers_is_proved() -> None:
    found = prove("data=2 consistency=stale(1) topology=server(shards=1,place=own)")
    assert "weights and optimizer state are where the equations lead" in found
    assert "again by its record, to the last bit" in found


@pytest.mark.slow
def test_a_plan_that_averages_in_pairs_is_proved() -> None:
    found = prove(PAIRS)
    assert "4 ranks averaged by the equations" in found and "to the last bit" in found
