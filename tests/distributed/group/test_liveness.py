"""Heartbeats: who left, who is silent, and one answer for all."""

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

from weft.distributed.group.liveness import Heartbeat, LivenessMonitor, PendingCall, find_left, find_silent, name_host
from weft.errors import PeerLostError

DEADLINE_SECONDS = 20.0
counts = st.integers(min_value=0, max_value=2**40)


def heartbeat(num_collectives: int = 0, *, waiting: bool = False, closed: bool = False) -> Heartbeat:
    return Heartbeat("host", 1, num_collectives, is_waiting=waiting, is_closed=closed)


@contextmanager
def use_monitor(
    peer: Heartbeat, *, rank: int = 0, timeout: float = 5.0
) -> Iterator[tuple[LivenessMonitor, Any, threading.Event]]:
    """One rank of two; the other is no more than its heartbeat in the store."""
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store.set(f"heartbeat/{1 - rank}", peer.encode())
    told = threading.Event()
    monitor = LivenessMonitor(store, rank, 2, timeout=timeout, on_lost=lambda _: told.set())
    try:
        yield monitor, store, told
    finally:
        store.set(f"heartbeat/{1 - rank}", replace(peer, is_closed=True).encode())
        monitor.close()
        monitor.close()


def living_peer() -> Heartbeat:
    return Heartbeat(name_host(), os.getpid())


def test_a_peer_that_lives_is_not_lost() -> None:
    with use_monitor(living_peer()) as (monitor, _, _):
        monitor.check()
        assert not monitor.has_lost


def test_its_thread_has_ended_when_python_ends() -> None:
    """Once a rank that torchrun had started aborted at its end, "terminate called without an active exception": the
    thread was in a call of the store, and was unwound through C++."""
    with use_monitor(living_peer()) as (monitor, _, _):
        (at_exit,) = (one for one in [monitor._at_exit] if one.alive and one.atexit)
        at_exit()
        assert not monitor._thread.is_alive()


def test_a_peer_whose_process_has_ended_is_lost() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with use_monitor(replace(living_peer(), pid=process.pid)) as (monitor, _, told):
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="rank 1 of 2 is lost: its process has ended") as lost:
            monitor.check()
        assert lost.value.peer == 1


def test_a_peer_on_another_host_is_lost_when_its_heartbeat_stands_still() -> None:
    with use_monitor(Heartbeat("far", 1), timeout=0.2) as (monitor, _, told):
        assert told.wait(DEADLINE_SECONDS)
        assert monitor.has_lost


def test_a_peer_that_left_is_lost_to_a_call_that_needs_it() -> None:
    with use_monitor(replace(living_peer(), is_closed=True)) as (monitor, _, told):
        monitor.begin(told)
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="it has left the group"):
            monitor.check()


def test_a_call_that_took_too_long_is_explained_by_the_silent_peer() -> None:
    with use_monitor(living_peer()) as (monitor, store, told):
        monitor.begin(told)
        with pytest.raises(PeerLostError, match="silent for more than 5 s") as lost:
            monitor.explain(told, was_timeout=True)
        assert lost.value.peer == 1
        assert store.get("loss").startswith(b"1 silent")


def test_the_loss_that_another_rank_found_is_taken_over() -> None:
    with use_monitor(living_peer()) as (monitor, store, told):
        store.set("loss", "1 somebody said so")
        assert told.wait(DEADLINE_SECONDS)
        with pytest.raises(PeerLostError, match="somebody said so"):
            monitor.check()


def test_a_peer_that_never_comes_is_named() -> None:
    store: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(PeerLostError, match="rank 1 of 2 did not come within") as lost:
        LivenessMonitor(store, 0, 2, timeout=0.01, on_lost=lambda _: None)
    assert lost.value.peer == 1


def test_a_failure_that_no_peer_caused_is_left_unexplained() -> None:
    with use_monitor(living_peer(), timeout=0.1) as (monitor, _, told):
        monitor.explain(told, was_timeout=False)
        assert not monitor.has_lost


@given(pid=counts, num=counts, waiting=st.booleans(), closed=st.booleans(), beat=counts)
def test_a_heartbeat_survives_its_text(pid: int, num: int, waiting: bool, closed: bool, beat: int) -> None:
    written = Heartbeat("a-host", pid, num, waiting, closed, beat)
    assert Heartbeat.decode(written.encode()) == written


@pytest.mark.parametrize(
    ("heartbeats", "pending", "left"),
    [
        ([heartbeat(1), heartbeat(1)], [PendingCall(1)], None),
        ([heartbeat(1), heartbeat(1, closed=True)], [PendingCall(1)], None),  # it took part before it left
        ([heartbeat(2), heartbeat(1, closed=True)], [PendingCall(2)], 1),
        ([heartbeat(), heartbeat(closed=True), heartbeat()], [PendingCall(peer=2)], None),
        ([heartbeat(), heartbeat(), heartbeat(closed=True)], [PendingCall(peer=2)], 2),
    ],
)
def test_who_left_is_missed_only_where_it_is_needed(
    heartbeats: list[Heartbeat], pending: list[PendingCall], left: int
) -> None:
    assert find_left(heartbeats, pending) == left


@pytest.mark.parametrize(
    ("heartbeats", "call", "silent"),
    [
        ([heartbeat(5, waiting=True), heartbeat(5, waiting=True), heartbeat(4)], PendingCall(5), 2),
        (
            [heartbeat(5, waiting=True), heartbeat(3, waiting=True), heartbeat(4)],
            PendingCall(5),
            1,
        ),  # the one furthest behind
        ([heartbeat(waiting=True), heartbeat(), heartbeat(waiting=True)], PendingCall(peer=1), 1),
        (
            [heartbeat(waiting=True), heartbeat(waiting=True), heartbeat()],
            PendingCall(peer=1),
            2,
        ),  # the peer waits for another itself
        ([heartbeat(waiting=True), heartbeat(waiting=True), heartbeat(waiting=True)], PendingCall(peer=1), 1),
    ],
)
def test_the_silent_one_is_behind_or_waits_for_nobody(
    heartbeats: list[Heartbeat], call: PendingCall, silent: int
) -> None:
    assert find_silent(heartbeats, 0, call) == silent
