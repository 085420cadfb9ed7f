"""Real ranks on the stand-in accelerator: every scheme, checkpoints, `weave`, and the contract of a group that stages."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes.ranks import run_processes

PLANS = [
    "data=2",
    "data=2 topology=ring",
    "data=2 topology=server(2)",
    "data=2 consistency=local(2,outer=nesterov)",
    "data=2 consistency=elastic(2)",
    "data=2 consistency=gossip(ring)",
    "data=2 consistency=gossip(ring,mix=pair)",
    "data=2 consistency=elastic(2) topology=server",
    "data=2 consistency=async topology=server(2)",
    "data=2 consistency=stale(1) topology=server",
    "data=2 consistency=backup(1) topology=server",
]


@pytest.mark.slow
def test_every_scheme_has_the_bits_of_the_cpu(tmp_path: Path) -> None:
    found: dict[str, Any] = run_processes(
        "tests.stand_in.programs:train_plans", 2, plans=PLANS, folder=str(tmp_path), deadline=120
    )[0]
    assert list(found) == PLANS
    for plan, (cpu, stand_in) in found.items():
        assert stand_in == cpu, plan
