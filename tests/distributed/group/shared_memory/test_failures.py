"""Dead, silent, departing and disagreeing ranks: every survivor raises, names the rank, and nothing is left behind."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.distributed.group.calls import AllReduce, Broadcast, Recv
from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.distributed.group.shared_memory.engine import Outcome, Reason
from weft.distributed.group.shared_memory.python_calls import Collectives
from weft.distributed.group.shared_memory.request import make_request
from weft.errors import PeerLostError, UsageError

Run = Callable[..., list[Any]]


def lost_peer(call: Callable[[], object]) -> int:
    with pytest.raises(PeerLostError) as caught:
        call()
    return caught.value.peer


@pytest.mark.parametrize("length", [10, 1_000_000])
def test_a_killed_rank_is_named_by_all_others_at_once_and_ever_after(
    run_ranks: Run, length: int, compiled: bool
) -> None:
    def program(group: SharedMemoryGroup) -> list[int]:
        tensor = torch.ones(length)
        group.all_reduce(tensor)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first = lost_peer(lambda: group.all_reduce(tensor))
        return [first, lost_peer(group.barrier), lost_peer(lambda: group.send(tensor, 0))]

    assert run_ranks(program, 4, compiled=compiled, timeout=50.0) == [[1, 1, 1], None, [1, 1, 1], [1, 1, 1]]


def test_a_rank_that_dies_inside_a_call_is_named(run_ranks: Run) -> None:
    def program(group: SharedMemoryGroup) -> int:
        tensor = group.empty((4_000_000,)).zero_()
        group.barrier()
        if group.rank == 2:
            group.start(AllReduce(tensor))
            os.kill(os.getpid(), signal.SIGKILL)
        return lost_peer(lambda: [group.all_reduce(tensor) for _ in range(3)])

    assert run_ranks(program, 3, timeout=50.0) == [2, 2, None]


def test_a_silent_rank_is_named_and_is_told(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> list[int]:
        if group.rank == 1:
            while Path(f"/proc/{os.getppid()}/stat").exists() and not heard.is_set():
                heard.wait(1.0)
        return [lost_peer(group.barrier), group.rank]

    class _Heard:
        """Set when the timeout of the others is over."""

        def __init__(self) -> None:
            self.end = time.monotonic() + 3.0

        def is_set(self) -> bool:
            return time.monotonic() > self.end

        def wait(self, seconds: float) -> None:
            signal.sigtimedwait([signal.SIGUSR1], seconds)

    heard = _Heard()
    assert run_ranks(program, 3, compiled=compiled, timeout=1.0) == [[1, 0], [1, 1], [1, 2]]


def test_a_job_that_was_frozen_goes_on(run_ranks: Run, compiled: bool) -> None:
    """The first to wake used to find its peers silent for longer than the timeout."""

    def program(group: SharedMemoryGroup) -> float:
        pids = torch.zeros(2, dtype=torch.int64)
        group.all_gather(pids, torch.tensor([os.getpid()]))
        if group.rank == 1:
            waiting, late = pids.tolist()
            script = f"kill -STOP {waiting} {late}; sleep 1.3; kill -CONT {waiting}; sleep 0.1; kill -CONT {late}"
            subprocess.run(["sh", "-c", script], check=True)
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        return float(tensor)

    assert run_ranks(program, 2, compiled=compiled, timeout=1.2) == [2.0, 2.0]


def test_a_call_that_breaks_off_has_failed_for_all(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it was asked again it used to say that it had ended well."""

    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def program(group: SharedMemoryGroup) -> list[int]:
        if group.rank == 1:
            return [lost_peer(lambda: [group.barrier() for _ in range(3)])]
        work = group.start(AllReduce(torch.ones(3)))
        monkeypatch.setattr(Collectives, "_put", break_off)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        return [lost_peer(work.wait), lost_peer(group.barrier)]

    assert run_ranks(program, 2, compiled=False) == [[0, 0], [0]]


def test_a_rank_that_leaves_early_is_named(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> int:
        return lost_peer(lambda: group.all_reduce(torch.ones(3))) if group.rank else -1

    assert run_ranks(program, 2, compiled=compiled) == [-1, 0]


def test_a_rank_may_leave_after_its_last_call(run_ranks: Run, compiled: bool) -> None:
    """The others still read what it left in shared memory."""

    def program(group: SharedMemoryGroup) -> float:
        tensor = torch.full((700_000,), float(group.rank))
        group.broadcast(tensor, root=0)
        if group.rank == 0:
            group.send(torch.tensor([5.0]), 1)
            return 5.0
        if group.rank == 2:
            return 5.0
        group.recv(tensor[:1], 0)
        return float(tensor[0])

    assert run_ranks(program, 3, compiled=compiled) == [5.0] * 3


@pytest.mark.parametrize("length", [10, 100_000])
def test_calls_that_do_not_match_are_refused(run_ranks: Run, length: int, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> str:
        with pytest.raises(UsageError, match="do not match") as caught:
            group.all_reduce(torch.ones(length + group.rank))
        return str(caught.value)

    texts = run_ranks(program, 2, compiled=compiled)
    assert any("rank: 0, other rank: 1" in text or "rank: 1, other rank: 0" in text for text in texts)


def test_a_call_behind_one_that_does_not_match_fails_too(run_ranks: Run, compiled: bool) -> None:
    """It used to begin at the round of the first one, and so to meet the peer's call after all."""

    def program(group: SharedMemoryGroup) -> int:
        if group.rank == 1:
            with suppress(UsageError):  # a root need not look at its peers' calls
                group.broadcast(torch.ones(11), root=1)
            return 2
        works = [group.start(Broadcast(torch.ones(length), root=1)) for length in (10, 11)]
        for work in works:
            with pytest.raises(UsageError, match="do not match"):
                work.wait()
        return len(works)

    assert run_ranks(program, 2, compiled=compiled) == [2, 2]


def test_a_message_of_another_size_is_refused(run_ranks: Run, compiled: bool) -> None:
    def program(group: SharedMemoryGroup) -> None:
        if group.rank == 0:
            group.send(torch.ones(3), 1)
            group.send(torch.ones(2), 1)
            return
        with pytest.raises(UsageError, match="do not match"):
            group.recv(torch.empty(2), 0)
        group.recv(torch.empty(2), 0)

    run_ranks(program, 2, compiled=compiled)


def test_close_gives_everything_back_and_keeps_tensors_valid(tmp_path: Path, compiled: bool) -> None:
    def count() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:weft")
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps

    SharedMemoryGroup(tmp_path, 0, 1, compiled=compiled).close()
    before, entries = count(), os.listdir("/dev/shm")
    group = SharedMemoryGroup(tmp_path, 0, 1, compiled=compiled)
    tensor = group.empty((1000,)).fill_(2.0)
    work = group.start(Recv(torch.empty(1), peer=0))
    group.close()
    group.close()
    assert float(tensor.sum()) == 2000.0
    with pytest.raises(UsageError, match="closed while"):
        work.wait()
    with pytest.raises(UsageError, match="group is closed"):
        group.barrier()
    del tensor, work, group
    assert (count(), os.listdir("/dev/shm"), list(tmp_path.iterdir())) == (before, entries, [])


def test_other_threads_may_wait_while_the_group_is_closed(run_ranks: Run, tmp_path: Path, compiled: bool) -> None:
    """They used to go on in memory that was gone. It is a race, so there are many rounds."""

    def wait(group: SharedMemoryGroup, is_ready: threading.Event, errors: list[str]) -> None:
        work = group.start(Recv(torch.empty(1), peer=0))
        is_ready.set()
        with pytest.raises(UsageError) as caught:
            work.wait()
        errors.append(str(caught.value))

    def program(_: SharedMemoryGroup) -> list[str]:
        errors: list[str] = []
        for _round in range(30):
            group = SharedMemoryGroup(tmp_path, 0, 1, compiled=compiled)
            ready = [threading.Event() for _ in range(3)]
            threads = [threading.Thread(target=wait, args=(group, is_ready, errors)) for is_ready in ready]
            for thread, is_ready in zip(threads, ready, strict=True):
                thread.start()
                is_ready.wait()
            group.close()
            for thread in threads:
                thread.join()
        return errors

    text = "the group was closed while a call was under way (rank: 0); wait for it before"
    assert run_ranks(program, 1, compiled=compiled) == [[text] * 90]


def test_an_engine_that_is_closed_ends_what_comes(tmp_path: Path, compiled: bool) -> None:
    """Another thread may have asked the group for its engine just before."""
    group = SharedMemoryGroup(tmp_path, 0, 1, compiled=compiled)
    assert group._attachment is not None
    engine = group._attachment.engine
    group.close()
    request, closed = make_request(Recv(torch.empty(1), peer=0), 0, 1), Outcome(Reason.CLOSED, 0)
    handle = engine.start(request)
    assert engine.is_done(handle) and engine.wait(handle) == engine.run(request) == closed
    engine.forget(handle)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"missing: \[1, 2\]") as caught:
        SharedMemoryGroup(tmp_path, 0, 3, timeout=0.05)
    assert caught.value.peer == 1
    with pytest.raises(PeerLostError, match="rank 0 did not open"):
        SharedMemoryGroup(tmp_path, 1, 3, timeout=0.05)
    assert list(tmp_path.iterdir()) == []


def test_an_invitation_of_a_dead_rank_is_passed_over(run_ranks: Run, tmp_path: Path) -> None:
    def program(group: SharedMemoryGroup) -> int:
        return group.size

    stale = tmp_path / "segment-0.json"
    stale.write_text("999999999 1 5")
    with pytest.raises(PeerLostError, match="rank 0 did not open"):
        SharedMemoryGroup(tmp_path, 1, 2, timeout=0.05)
    assert run_ranks(program, 2) == [2, 2]
