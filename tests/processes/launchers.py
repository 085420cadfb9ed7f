"""Real mpirun and torchrun for tests; run as a program, this file is one of their ranks."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from weft.engines.rank_process import run_rank
from weft.engines.rank_program import RankProgram, read_failure, read_result

DEADLINE_SECONDS = 120.0
BIN = Path(sys.executable).parent


def mpirun(size: int, *options: str) -> list[str]:
    """On this host alone: shared memory between ranks, which leave the core to each other while they wait; and as root
    where tests run as root."""
    local = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    local += ["--mca", "btl", "self,sm", "--mca", "pml", "ob1"]
    return [str(BIN / "mpirun"), *local, *options, "-n", str(size), sys.executable]


def torchrun(size: int) -> list[str]:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *meeting, "--nnodes", "1", "--nproc-per-node", str(size)]


def run_launched(command: list[str], path: str, size: int, **arguments: Any) -> tuple[list[Any], str]:
    """Results in rank order, None for a rank without one, and what was printed to standard error."""
    with tempfile.TemporaryDirectory(prefix="weft-test-") as name:
        RankProgram(path, arguments).write(Path(name))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        errors = _run([*command, "-m", "tests.processes.launchers", name], environment)
        failures = [failure for rank in range(size) if (failure := read_failure(Path(name), rank))]
        assert not failures, failures[0].traceback
        files = [Path(name) / f"result-{rank}.json" for rank in range(size)]
        return [read_result(Path(name), r) if file.exists() else None for r, file in enumerate(files)], errors


def _run(command: list[str], environment: dict[str, str]) -> str:
    """What the command printed to standard error. One that is late is ended, and its ranks with it."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=DEADLINE_SECONDS)[1]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


if __name__ == "__main__":
    own_rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
    sys.exit(run_rank(Path(sys.argv[1]), int(own_rank)))
