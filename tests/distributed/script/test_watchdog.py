"""The watchdog of each rank, over a store, with threads for ranks: who is told what, and who is left alone."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as distributed

from weft.distributed.script.world import watchdog as watching
from weft.distributed.script.world.watchdog import Board, Watchdog
from weft.distributed.script.world.whereabouts import Whereabouts
from weft.errors import OutOfStepError, PeerLostError

DEADLINE_SECONDS = 20.0
_c10d: Any = distributed


class Wait:
    """Something that a rank waits in until it is closed."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


class Rank:
    """A watched rank whose calls are made by the test."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.whereabouts = Whereabouts()
        self.board = Board(_c10d.PrefixStore("notes", store), rank, size)
        self.watchdog = Watchdog(self.whereabouts, self.board)
        self.wait = Wait()
        self.watchdog.start()

    def make(self, kind: str) -> None:
        self.whereabouts.end(self.whereabouts.begin(kind))

    def begin(self, kind: str, *, together: bool = True) -> None:
        self.whereabouts.begin(kind, self.wait, together=together)

    def leave_when_told(self) -> str:
        assert self.wait.is_closed.wait(DEADLINE_SECONDS)
        error = self.watchdog.explain(ConnectionError("closed"))
        self.whereabouts.end(None)
        assert isinstance(error, OutOfStepError)
        return str(error)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Rank]]]:
    monkeypatch.setattr(watching, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watching, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(watching, "LINGER_SECONDS", 0.0)
    monkeypatch.delattr("sys.last_value", raising=False)  # pytest leaves that of a test that failed before
    made: list[Rank] = []

    def make(size: int) -> list[Rank]:
        store = _c10d.HashStore()
        made.extend(Rank(store, rank, size) for rank in range(size))
        return made

    yield make
    for rank in made:
        rank.whereabouts.end(None)
        rank.watchdog.leave()


def test_ranks_that_wait_in_different_calls_are_told_the_same(ranks: Callable[[int], list[Rank]]) -> None:
    first, second, third = ranks(3)
    for rank in (first, second, third):
        rank.make("weft.weave")
    first.begin("backward")
    second.begin("weft.mean")
    texts = [first.leave_when_told(), second.leave_when_told()]
    assert texts[0] == texts[1]
    assert "rank 0 waits in backward at" in texts[0] and "rank 1 waits in weft.mean at" in texts[0]
    # The third computes for a while; its next call fails, and tells why.
    third.begin("backward")
    assert str(third.watchdog.explain(PeerLostError("rank 0 left", 0))) == texts[0]


def test_one_that_computes_for_long_is_left_alone_and_waited_for(ranks: Callable[[int], list[Rank]]) -> None:
    first, second = ranks(2)
    second.begin("backward")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while first.board.read()[1].state != "waits":  # it has lost patience, and looks
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert second.watchdog.finding is None and not second.wait.is_closed.is_set()
    first.begin("backward")
    for rank in (first, second):
        rank.whereabouts.end(None)
    while first.board.read()[1].state != "works":  # it takes back what it has told
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_ends_tells_those_who_wait(ranks: Callable[[int], list[Rank]]) -> None:
    first, second = ranks(2)
    for rank in (first, second):
        rank.make("backward")
    first.begin("backward")
    second.watchdog.leave()
    text = first.leave_when_told()
    assert "the script has ended on rank 1" in text and "rank 1 has ended; its last call was backward at" in text


def test_a_rank_that_failed_is_named_as_the_cause(
    ranks: Callable[[int], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(2)
    monkeypatch.setattr("sys.last_value", ValueError("no\nsuch file"), raising=False)
    second.watchdog.leave()
    first.begin("backward")
    error = first.watchdog.explain(PeerLostError("rank 1 left", 1))
    assert isinstance(error, PeerLostError) and error.peer == 1
    assert str(error).startswith("rank 1 failed (ValueError: no such file); rank 0 waits in backward at ")


def test_a_loss_that_nobody_has_announced_is_as_it_was(ranks: Callable[[int], list[Rank]]) -> None:
    first, _ = ranks(2)
    first.begin("backward")
    lost = PeerLostError("rank 1 died", 1)
    assert first.watchdog.explain(lost) is lost


def test_ranks_at_their_own_pace_are_told_when_nothing_moves_for_long(
    ranks: Callable[[int], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(2)
    first.begin("optimizer.step", together=False)
    second.begin("weft.mean")
    time.sleep(0.2)
    assert first.watchdog.finding is None
    monkeypatch.setattr(watching, "STUCK_SECONDS", 0.1)
    assert first.leave_when_told() == second.leave_when_told()


def test_one_that_does_not_leave_its_call_gets_an_error_raised_in_it(
    ranks: Callable[[int], list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "CLOSING_SECONDS", 0.05)
    monkeypatch.setattr(watching, "GRACE_SECONDS", DEADLINE_SECONDS)
    first, second = ranks(2)
    second.begin("weft.mean")
    deadline = time.monotonic() + DEADLINE_SECONDS
    first.whereabouts.begin("backward")  # in nothing that could be closed
    with pytest.raises(OutOfStepError):
        while time.monotonic() < deadline:
            time.sleep(0.01)
    first.whereabouts.end(None)
    second.leave_when_told()
