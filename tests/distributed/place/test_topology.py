"""`topology=auto` on real ranks: they measure two levels, choose, and add up."""

import pytest

from tests.processes.ranks import run_processes


@pytest.mark.slow
def test_real_ranks_measure_their_hosts_and_add_up_by_what_they_chose() -> None:
    """Four ranks of one machine play two hosts."""
    found = run_processes("tests.processes.programs:choose_by_probe", 4, ranks_per_host=2)
    assert found == [[2, 10.0, 10.0, 10.0, own] for own in (4.0, 6.0, 4.0, 6.0)]
