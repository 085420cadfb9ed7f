"""The parts that need no second process: requests, the arena, rendezvous, the choice of an engine."""

import gc
import mmap
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.distributed.group import calls
from weft.distributed.group.shared_memory import SharedMemoryGroup, python_engine
from weft.distributed.group.shared_memory.arena import Arena, FreeList
from weft.distributed.group.shared_memory.rendezvous import Invitation, read_start_time
from weft.distributed.group.shared_memory.request import make_request
from weft.errors import UsageError


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=40))
def test_the_free_list_gives_out_no_byte_twice_and_gets_all_back(steps: list[tuple[int, bool]]) -> None:
    free, taken = FreeList(200), list[tuple[int, int]]()
    for num_bytes, give_back in steps:
        offset = free.take(num_bytes)
        if offset is not None:
            assert all(offset + num_bytes <= o or o + n <= offset for o, n in taken)
            assert 0 <= offset <= 200 - num_bytes
            taken.append((offset, num_bytes))
        if give_back and taken:
            free.give_back(*taken.pop(0))
    for part in taken:
        free.give_back(*part)
    assert free.gaps == [(0, 200)]


def test_the_arena_reuses_what_is_dropped(tmp_path: Path) -> None:
    group = SharedMemoryGroup(tmp_path, 0, 1)
    first = group.empty((1000, 3), torch.float64)
    where = first.data_ptr()
    view = first[1:]
    del first
    assert group.empty((3000,), torch.float64).data_ptr() != where
    del view
    assert group.empty((3000,), torch.float64).data_ptr() == where
    assert group.empty((0, 2)).shape == (0, 2)
    group.close()


def test_the_garbage_collector_may_drop_a_tensor_inside_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to wait for the lock that its own thread held, for ever."""
    arena = Arena(mmap.mmap(-1, 8192), 0, 8192)
    ring: list[object] = [arena.empty((1,), torch.float32)]
    ring.append(ring)
    del ring
    take = FreeList.take

    def collect_and_take(free: FreeList, num_bytes: int) -> int | None:
        gc.collect()
        return take(free, num_bytes)

    monkeypatch.setattr(FreeList, "take", collect_and_take)
    thread = threading.Thread(target=arena.empty, args=((1,), torch.float32), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (calls.AllReduce(torch.ones(2, dtype=torch.int64), "mean"), "no mean"),
        (calls.AllReduce(torch.ones(2, dtype=torch.complex64)), "cannot be reduced"),
        (calls.AllReduce(torch.ones(2, device="meta")), "dense tensors of the CPU"),
        (calls.AllGather(torch.ones(3), torch.ones(2)), "2 parts"),
        (calls.AllGather(torch.ones(4), torch.ones(2, dtype=torch.int32)), "2 parts"),
        (calls.ReduceScatter(torch.ones(2), torch.ones(5)), "2 parts"),
        (calls.AllToAll(torch.ones(3), torch.ones(3)), "does not divide"),
        (calls.Broadcast(torch.ones(2), root=2), "root is not in the group"),
        (calls.Send(torch.ones(2), peer=-1), "peer is not in the group"),
        (calls.NeighbourAllReduce(torch.ones(2), ((1,),), ((1.0, 1.0),)), "graph does not fit"),
        (calls.NeighbourAllReduce(torch.ones(2), ((1,), ()), ((1.0,), (1.0,))), "weights do not fit"),
        (calls.NeighbourAllReduce(torch.ones(2, dtype=torch.int32), ((), ()), ((1.0,), (1.0,))), "floating-point"),
    ],
)
def test_what_cannot_be_carried_is_refused_before_it_starts(call: calls.Call, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_request(call, 0, 2)


def test_an_invitation_is_for_one_life_of_a_process() -> None:
    descriptor = os.memfd_create("test")
    start_time = read_start_time(os.getpid())
    assert start_time is not None
    invitation = Invitation(os.getpid(), start_time, descriptor)
    assert Invitation.parse(str(invitation)) == invitation
    opened = invitation.open()
    assert opened is not None
    os.close(opened)
    assert Invitation(os.getpid(), start_time + 1, descriptor).open() is None
    os.close(descriptor)
    assert invitation.open() is None


def test_a_dead_process_that_nobody_has_reaped_is_gone() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_start_time(process.pid) is None
    process.wait()


def test_a_process_that_ends_while_it_is_asked_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its last moment on, its descriptors belong to root."""

    def refuse(*_: object) -> int:
        raise PermissionError

    start_time = read_start_time(os.getpid())
    assert start_time is not None
    monkeypatch.setattr(os, "open", refuse)
    assert Invitation(os.getpid(), start_time, 0).open() is None


def test_without_a_compiler_the_python_engine_takes_over_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.distributed.group.shared_memory import native

    native.load_library.cache_clear()
    monkeypatch.setenv("WEFT_NO_COMPILER", "1")
    with pytest.warns(UserWarning, match="shared memory runs in Python"):
        group = SharedMemoryGroup(tmp_path, 0, 1)
    group.barrier()
    group.close()


def test_an_engine_that_cannot_be_made_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(python_engine, "PythonEngine", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(MemoryError):
        SharedMemoryGroup(tmp_path, 0, 1, compiled=False)
    assert os.listdir("/proc/self/fd") == before


def test_a_rank_beyond_the_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such rank"):
        SharedMemoryGroup(tmp_path, 2, 2)
