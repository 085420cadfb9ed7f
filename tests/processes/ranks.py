"""Real processes as ranks for tests, forked from a server that has imported torch: milliseconds each, not seconds."""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft.engines.rank_process import run_rank
from weft.engines.rank_program import RankProgram, read_failure, read_result

DEADLINE_SECONDS = 40.0


def run_processes(path: str, size: int, *, deadline: float = DEADLINE_SECONDS, **arguments: Any) -> list[Any]:
    """Call `module:function` with the arguments on every rank; results in rank order, None for a rank that died.

    Raises AssertionError with the first traceback of a rank that failed, or when the ranks outlive the deadline; the
    stack of each is then on its standard error.
    """
    with tempfile.TemporaryDirectory(prefix="weft-test-") as name:
        folder = Path(name)
        RankProgram(path, arguments).write(folder)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "weft.distributed.place", "weft.distributed.group.shared_memory"])
        ranks = [context.Process(target=_be_rank, args=(name, rank, size, deadline)) for rank in range(size)]
        try:
            for rank in ranks:
                rank.start()
            is_late = not _join(ranks, deadline)
        finally:
            _end(ranks)
        failures = [failure for rank in range(size) if (failure := read_failure(folder, rank))]
        if failures:
            raise AssertionError(min(failures, key=lambda f: (f.is_witness, f.moment)).traceback)
        assert not is_late, f"ranks were not done after {deadline} s"
        return [read_result(folder, r) if (folder / f"result-{r}.json").exists() else None for r in range(size)]


def _be_rank(folder: str, rank: int, size: int, deadline: float) -> None:
    import torch

    torch.set_num_threads(1)
    # The last resort, should the test itself be killed and nobody be left to end its ranks.
    signal.alarm(int(deadline) + 10)
    faulthandler.dump_traceback_later(deadline - 1)
    os.environ.update(WEFT_RANK=str(rank), WEFT_SIZE=str(size), WEFT_MEETING=folder)
    run_rank(Path(folder), rank)
    faulthandler.cancel_dump_traceback_later()


def _join(ranks: Sequence[BaseProcess], seconds: float) -> bool:
    """Whether all ended in time."""
    until = time.monotonic() + seconds
    for rank in ranks:
        rank.join(max(0.0, until - time.monotonic()))
    return all(rank.exitcode is not None for rank in ranks)


def _end(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        if rank.pid is not None:
            rank.kill()
            rank.join()
            rank.close()
