"""Relaxed consistency on real processes over shared memory: the equations are kept there too."""

import pytest

from tests.distributed.consistency.cases import prove_this_rank
from tests.processes.ranks import run_processes

CONSISTENCIES = ["local(2,state=mean)", "gossip(ring)", "elastic(2)"]


@pytest.mark.slow
def test_real_ranks_follow_the_equations() -> None:
    path = f"{prove_this_rank.__module__}:{prove_this_rank.__name__}"
    for rank, findings in enumerate(run_processes(path, 2, consistencies=CONSISTENCIES)):
        for consistency, finding in zip(CONSISTENCIES, findings, strict=True):
            assert finding.startswith("2 ranks followed the equations"), (rank, consistency, finding)
