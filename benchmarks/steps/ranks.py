"""The ranks of one system as processes that sleep until their turn."""

import json
import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RankError", "Ranks", "Times"]

ANSWER_SECONDS = 240.0  # DeepSpeed compiles at its first use
CHECKOUT = Path(__file__).resolve().parents[2]


class Times(NamedTuple):
    """Seconds per step: by the clock, and of computation (all threads of a rank)."""

    wall: float
    cpu: float


class RankError(Exception):
    """A rank could not do what it was told; the text says why. Its pair is ended, for its peer may wait for ever."""


class Ranks:
    """Processes of one thread each. What they print goes to a file in `folder`."""

    def __init__(self, system: str, num_ranks: int, folder: Path) -> None:
        self.system = system
        folder.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        self._processes = [self._start(rank, num_ranks, folder, port) for rank in range(num_ranks)]

    def load(self, case: str) -> None:
        self._ask({"load": case}, self._processes)

    def run(self, num_steps: int, num_ranks: int | None = None) -> Times:
        """The times of a step, of the slower rank; with the first `num_ranks` only where they do not talk."""
        answers = self._ask({"run": num_steps}, self._processes[:num_ranks])
        return Times(max(answer["wall"] for answer in answers), max(answer["cpu"] for answer in answers))

    def close(self) -> None:
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()

    def _start(self, rank: int, num_ranks: int, folder: Path, port: int) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **_environment(self.system, rank, num_ranks, folder, port)}
        with (folder / f"{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.steps.rank", self.system],
                env=environment,
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )

    def _ask(self, command: dict[str, Any], processes: "list[subprocess.Popen[bytes]]") -> list[dict[str, Any]]:
        if not processes:
            raise RankError("its ranks have ended")
        try:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(command).encode() + b"\n")
            return [self._hear(process) for process in processes]
        except (BrokenPipeError, RankError) as error:
            self.close()
            raise RankError(str(error)) from None

    def _hear(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise RankError(f"no answer in {ANSWER_SECONDS:g} s")
        line = process.stdout.readline()
        if not line:
            raise RankError("a rank ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RankError(answer["error"])
        return answer


def _environment(system: str, rank: int, num_ranks: int, folder: Path, port: int) -> dict[str, str]:
    """What `weft launch` sets for its ranks, and torchrun for all others."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if system.startswith("plain"):
        return threads
    if system == "weft":
        return threads | {"WEFT_RANK": str(rank), "WEFT_SIZE": str(num_ranks), "WEFT_MEETING": str(folder / "meeting")}
    return threads | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
