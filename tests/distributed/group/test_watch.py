"""Signs of life: who left, who is silent, and one verdict for all."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.group.watch import Pending, Sign, Watch, find_left, find_silent, name_host
from weft.errors import PeerLostError

DEADLINE_SECONDS = 20.0
counts = st.integers(min_value=0, max_value=2**40)


def sign(num_collectives: int = 0, *, waiting: bool = False, closed: bool = False) -> Sign:
    return Sign("host", 1, num_collectives, is_waiting=waiting, is_closed=closed)


@contextmanager
def use_watch(peer: Sign, *, rank: int = 0, timeout: float = 5.0) -> Iterator[tuple[Watch, Any, threading.Event]]:
    """One rank of two; the other is no more than its sign in the store."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set(f"sign/{1 - rank}", peer.encode())
    told = threading.Event()
    watch = Watch(store, rank, 2, timeout=timeout, on_lost=lambda _: told.set())
    try:
        yield watch, store, told
    finally:
        store.set(f"sign/{1 - rank}", replace(peer, is_closed=True).encode())
        watch.close()
        watch.close()


def living_peer() -> Sign:
    return Sign(name_host(), os.getpid())


def test_a_peer_that_lives_is_not_lost() -> None:
    with use_watch(living_peer()) as (watch, _, _):
        watch.check()
        assert not watch.has_lost


def test_a_peer_whose_process_has_ended_is_lost() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with use_watch(replace(living_peer(), pid=process.pid)) as (watch, _, told):
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="rank 1 of 2 is lost: its process has ended") as lost:
            watch.check()
        assert lost.value.peer == 1


def test_a_peer_on_another_host_is_lost_when_its_sign_stands_still() -> None:
    with use_watch(Sign("far", 1), timeout=0.2) as (watch, _, told):
        assert told.wait(DEADLINE_SECONDS)
        assert watch.has_lost


def test_a_peer_that_left_is_lost_to_a_call_that_needs_it() -> None:
    with use_watch(replace(living_peer(), is_closed=True)) as (watch, _, told):
        watch.begin(told)
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="it has left the group"):
            watch.check()


def test_a_call_that_took_too_long_is_explained_by_the_silent_peer() -> None:
    with use_watch(living_peer()) as (watch, store, told):
        watch.begin(told)
        with pytest.raises(PeerLostError, match="silent for more than 5 s") as lost:
            watch.explain(told, was_timeout=True)
        assert lost.value.peer == 1
        assert store.get("verdict").startswith(b"1 silent")


def test_the_verdict_of_another_rank_is_taken_over() -> None:
    with use_watch(living_peer()) as (watch, store, told):
        store.set("verdict", "1 somebody said so")
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="somebody said so"):
            watch.check()


def test_a_peer_that_never_comes_is_named() -> None:
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PeerLostError, match="rank 1 of 2 did not come within") as lost:
        Watch(store, 0, 2, timeout=0.01, on_lost=lambda _: None)
    assert lost.value.peer == 1


def test_a_failure_that_no_peer_caused_is_left_unexplained() -> None:
    with use_watch(living_peer(), timeout=0.1) as (watch, _, told):
        watch.explain(told, was_timeout=False)
        assert not watch.has_lost


@given(pid=counts, num=counts, waiting=st.booleans(), closed=st.booleans(), beat=counts)
def test_a_sign_survives_its_text(pid: int, num: int, waiting: bool, closed: bool, beat: int) -> None:
    written = Sign("a-host", pid, num, waiting, closed, beat)
    assert Sign.decode(written.encode()) == written


@pytest.mark.parametrize(
    ("signs", "pending", "left"),
    [
        ([sign(1), sign(1)], [Pending(1)], None),
        ([sign(1), sign(1, closed=True)], [Pending(1)], None),  # it took part before it left
        ([sign(2), sign(1, closed=True)], [Pending(2)], 1),
        ([sign(), sign(closed=True), sign()], [Pending(peer=2)], None),
        ([sign(), sign(), sign(closed=True)], [Pending(peer=2)], 2),
    ],
)
def test_who_left_is_missed_only_where_it_is_needed(signs: list[Sign], pending: list[Pending], left: int) -> None:
    assert find_left(signs, pending) == left


@pytest.mark.parametrize(
    ("signs", "call", "silent"),
    [
        ([sign(5, waiting=True), sign(5, waiting=True), sign(4)], Pending(5), 2),
        ([sign(5, waiting=True), sign(3, waiting=True), sign(4)], Pending(5), 1),  # the one furthest behind
        ([sign(waiting=True), sign(), sign(waiting=True)], Pending(peer=1), 1),
        ([sign(waiting=True), sign(waiting=True), sign()], Pending(peer=1), 2),  # the peer waits for another itself
        ([sign(waiting=True), sign(waiting=True), sign(waiting=True)], Pending(peer=1), 1),
    ],
)
def test_the_silent_one_is_behind_or_waits_for_nobody(signs: list[Sign], call: Pending, silent: int) -> None:
    assert find_silent(signs, 0, call) == silent
