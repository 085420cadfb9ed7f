"""PyTorch's own suite for backends passes over `backend="weft"`; what it skips needs what this machine lacks."""

import re
from collections import Counter

import pytest

from tests.processes.ranks import run_processes

NUM_RANKS = 3
# Tests that wait for seconds until a time is over. A few of our own do the same in less.
WAITING = [
    "test_barrier",
    "test_barrier_full_group",
    "test_barrier_group",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_barrier_timeout_group",
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
]
# Why a test may be skipped: it is about CUDA or NCCL, needs four ranks or torchvision, or PyTorch has switched it off.
REASONS = re.compile(
    "CUDA|N[cC][cC][lL]|'nccl'|world size of 4|torchvision|^skipped: https://github.com/pytorch/|"
    "see https://github.com/pytorch/|flakiness"
)


def run_suite(*, names: tuple[str, ...] = (), left_out: tuple[str, ...] = ()) -> Counter[str]:
    """How many tests passed and were skipped. Fails with the first traceback of one that did not."""
    path = "tests.distributed.torch_suite:run"
    ranks = run_processes(path, NUM_RANKS, deadline=240, backend="weft", names=names, left_out=left_out)
    counts: Counter[str] = Counter()
    for name in ranks[0]:
        ends = [rank[name] for rank in ranks]
        for end in ends:
            assert end == "passed" or REASONS.search(end), f"{name}: {end}"
        counts["passed" if set(ends) == {"passed"} else "skipped"] += 1
    return counts


@pytest.mark.slow
def test_pytorchs_own_suite() -> None:
    """All but what waits for long."""
    assert run_suite(left_out=tuple(WAITING)) == {"passed": 116, "skipped": 161}


@pytest.mark.long
def test_all_of_pytorchs_own_suite() -> None:
    assert run_suite() == {"passed": 124, "skipped": 161}
