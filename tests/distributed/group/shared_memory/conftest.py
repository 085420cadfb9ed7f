"""Ranks as real processes over one rendezvous folder, with a deadline; what they return is JSON."""

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from weft.distributed.group.shared_memory import SharedMemoryGroup
from weft.distributed.group.shared_memory.native import load_library

DEADLINE = 60.0  # seconds, for all ranks together

Program = Callable[[SharedMemoryGroup], Any]


@pytest.fixture(scope="session", autouse=True)
def engine_is_there() -> None:
    """On a new machine it is compiled now, and not within the short time that ranks have for each other in a test."""
    load_library()


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[Any]]:
    """run_ranks(program, size): what `program(group)` gave on each rank; None for a rank that was killed."""

    def run(
        program: Program, size: int, *, compiled: bool = True, timeout: float = 30.0, late: tuple[int, ...] = ()
    ) -> list[Any]:
        folder = tmp_path / f"ranks-{time.monotonic_ns()}"
        folder.mkdir()
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        order = [*(rank for rank in range(size) if rank not in late), *late]
        ranks = {
            rank: context.Process(target=_rank, args=(program, folder, rank, size, compiled, timeout, pipes[rank][1]))
            for rank in order
        }
        for process in ranks.values():
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [_receive(pipes[rank][0], rank, time.monotonic() + DEADLINE) for rank in range(size)]
        finally:
            for process in ranks.values():
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for receiver, _ in pipes:
                receiver.close()

    return run


def _rank(
    program: Program, folder: Path, rank: int, size: int, compiled: bool, timeout: float, sender: Connection
) -> None:
    try:
        group = SharedMemoryGroup(folder, rank, size, compiled=compiled, timeout=timeout)
        try:
            answer = {"result": program(group)}
        finally:
            group.close()
    except BaseException:
        answer = {"error": traceback.format_exc()}
    sender.send_bytes(json.dumps(answer).encode())


def _receive(receiver: Connection, rank: int, deadline: float) -> Any:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        pytest.fail(f"rank {rank} gave no answer in time")
    try:
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        return None
    if "error" in answer:
        pytest.fail(f"rank {rank}:\n{answer['error']}")
    return answer["result"]
