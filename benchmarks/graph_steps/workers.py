"""Workers as seen from the outside: one process for each system."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Worker", "WorkerError"]

CHECKOUT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """A worker could not do what it was told; the text says why."""


class Worker:
    """A process that sleeps but for its turn. What it prints goes to a file in `folder`."""

    def __init__(self, system: str, num_threads: int, folder: Path) -> None:
        self.system = system
        threads = {"OMP_NUM_THREADS": str(num_threads), "MKL_NUM_THREADS": str(num_threads)}
        with (folder / f"{system.replace(' ', '-')}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.graph_steps.worker", system, str(num_threads)],
                env={**os.environ, **threads},
                cwd=CHECKOUT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def begin_to_load(self, case: str) -> None:
        """Have the case made and, where the system compiles, compiled; `losses` waits for it."""
        self._tell({"load": case})

    def losses(self) -> list[str]:
        """Of the first steps, in hexadecimal, so that they can be compared to the bit."""
        found: list[str] = self._hear()["losses"]
        return found

    def run(self, case: str, num_steps: int) -> float:
        """Seconds per step."""
        self._tell({"run": case, "steps": num_steps})
        return float(self._hear()["seconds"])

    def forget(self) -> None:
        self._tell({"forget": True})
        self._hear()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _tell(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError("the process ended") from None

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError("the process ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer
