"""Proofs from the command line, on real processes."""

import pytest

from tests.command_line import run_weft

PAIRS = "data=4 consistency=gossip(ring,mix=pair)"


def prove(plan: str, capfd: pytest.CaptureFixture[str]) -> str:
    outcome = run_weft(capfd, "prove", "digits_mlp", "--plan", plan, "--seeds", "0")
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.mark.slow
def test_a_plan_with_servers_is_proved(capfd: pytest.CaptureFixture[str]) -> None:
    found = prove("data=2 consistency=stale(1) topology=server(shards=1,place=own)", capfd)
    assert "weights and optimizer state are where the equations lead" in found
    assert "again by its record, to the last bit" in found


@pytest.mark.slow
def test_a_plan_that_averages_in_pairs_is_proved(capfd: pytest.CaptureFixture[str]) -> None:
    found = prove(PAIRS, capfd)
    assert "4 ranks averaged by the equations" in found and "to the last bit" in found
