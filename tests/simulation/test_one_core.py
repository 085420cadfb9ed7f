"""Simulations keep to cores of their own."""

import os

import pytest

from tests.processes.ranks import run_processes
from weft.simulation.one_core import claim_core, use_one_core

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")


def test_one_core_is_used_and_then_all_again() -> None:
    before = os.sched_getaffinity(0)
    with use_one_core():
        (core,) = os.sched_getaffinity(0)
        assert core in before
    assert os.sched_getaffinity(0) == before


def can_claim(core: int) -> bool:
    """What another process does, which ends with its claim."""
    global held
    held = claim_core(core)
    return held is not None


held: object = None


def test_a_core_is_claimed_by_one_process_until_it_ends() -> None:
    nobodys = 1_000_000 + os.getpid()

    def can_other_claim() -> list[bool]:
        return run_processes("tests.simulation.test_one_core:can_claim", 1, core=nobodys)

    mine = claim_core(nobodys)
    assert mine is not None
    assert can_other_claim() == [False]
    mine.close()
    assert can_other_claim() == [True]
    again = claim_core(nobodys)
    assert again is not None, "a process that has ended still holds its core"
    again.close()


def test_with_all_cores_taken_one_is_shared() -> None:
    before = os.sched_getaffinity(0)
    with use_one_core(), use_one_core():
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
