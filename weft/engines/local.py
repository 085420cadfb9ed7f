"""Ranks as processes of this machine: started together, ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol, final

from weft.engines.engine import STRICT, AbstractEngine, AbstractRanks, End, Tolerance, run_on
from weft.engines.fork_server import fork_rank
from weft.engines.rank_program import RankProgram, has_joined
from weft.engines.relay import Shows

__all__ = ["STRICT", "LocalEngine", "Tolerance", "run_ranks", "threads_per_rank"]

# How long the others may take to notice that a rank is gone and to say so, before they are ended.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.02


class Process(Protocol):
    """The part of subprocess.Popen that an engine needs."""

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def run_ranks(
    program: RankProgram,
    num_ranks: int,
    *,
    silent: bool = False,
    tolerance: Tolerance = STRICT,
    logs: Path | None = None,
    shows: Shows = "first",
    interrupts_all: bool = False,
) -> list[Any]:
    """Run the program in `num_ranks` processes of this machine; arguments and errors are those of `run_on`."""
    return run_on(
        LocalEngine(),
        program,
        num_ranks,
        silent=silent,
        tolerance=tolerance,
        logs=logs,
        shows=shows,
        interrupts_all=interrupts_all,
    )


def threads_per_rank(num_ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """How many threads each of so many ranks on this machine computes with: as the user says in OMP_NUM_THREADS, or
    else an equal part of the cores.

    >>> threads_per_rank(2, {"OMP_NUM_THREADS": "3"})
    3
    """
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # after a comma, of nested regions
    return int(given) if given.isdecimal() and int(given) else max(1, len(os.sched_getaffinity(0)) // num_ranks)


def rank_variables(
    rank: int, num_ranks: int, port: int, *, address: str = "127.0.0.1", num_hosts: int = 1
) -> dict[str, str]:
    """The variables that torchrun sets, for scripts that ask for them and for torch.distributed's `env://`.

    Args:
        num_hosts: each with the same number of ranks, which count host by host. Of several, the launcher of the first
            keeps the store of torch.distributed; of one, rank 0 of a script does so itself.
    """
    local_size = num_ranks // num_hosts
    numbers = {"": rank, "LOCAL_": rank % local_size, "ROLE_": rank, "GROUP_": rank // local_size}
    sizes = {"": num_ranks, "LOCAL_": local_size, "ROLE_": num_ranks, "GROUP_": num_hosts}
    return {
        **{f"{prefix}RANK": str(number) for prefix, number in numbers.items()},
        **{f"{prefix}WORLD_SIZE": str(size) for prefix, size in sizes.items()},
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"weft-{port}",  # by which libraries tell that a launcher like torchrun is there
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": str(num_hosts > 1),
    }


def reserve_port() -> socket.socket:
    """A port of the loopback interface that no other launch gets while the socket is open.

    It is bound and does not listen, so that whoever sets SO_REUSEADDR, as the store of torch.distributed does, can
    listen there. What remains: a program that asks for this very number could take it first.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


@final
class LocalEngine(AbstractEngine):
    """Starts ranks as processes of this machine.

    Args:
        forks: fork ranks from a process that has imported torch, where that is possible; else each imports it.
    """

    def __init__(self, *, forks: bool = True) -> None:
        self._forks = forks

    def start(self, folder: Path, num_ranks: int) -> "LocalRanks":
        ranks = LocalRanks(folder, num_ranks, forks=self._forks)
        try:
            ranks.start()
        except BaseException:
            ranks.end()
            raise
        return ranks


@final
class LocalRanks(AbstractRanks):
    """The processes of a run on this machine, one per rank.

    Args:
        num_ranks: on all machines.
        numbers: the ranks of this machine; all, if not given.
        variables: those that tell a rank who it is and where the others are; by default, on this machine.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        *,
        forks: bool = True,
        numbers: range | None = None,
        variables: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._numbers = range(num_ranks) if numbers is None else numbers
        self._variables = variables or self._tell_local
        self._forks = forks
        self._ranks: dict[int, Process] = {}
        self._restarts: Counter[int] = Counter()
        self._port = reserve_port()

    def start(self) -> None:
        for rank in self._numbers:
            self._ranks[rank] = self._start(rank)

    def wait(self, tolerance: Tolerance) -> list[End]:
        """One that was started again and finds that the others have ended has a time of grace too, after rank 0."""
        return self.watch(tolerance, lambda _: False)

    def watch(self, tolerance: Tolerance, has_failed_elsewhere: Callable[[Sequence[End]], bool]) -> list[End]:
        """Wait, and hear of ranks that are not of this machine.

        Args:
            has_failed_elsewhere: is given, again and again, how ranks have ended so far; whether one of another machine
                has failed.
        """
        ends: list[End] = []
        alive = set(self._numbers)
        deadline = float("inf")
        while alive and time.monotonic() < deadline:
            for rank in sorted(alive):
                end = self._poll(rank)
                if end is None:
                    continue
                if self._is_missed(end, tolerance, leads=0 in alive):
                    self._restarts[rank] += 1
                    self._ranks[rank] = self._start(rank)
                    continue
                alive.remove(rank)
                ends.append(end)
                if end.code and not tolerance.spares(end) and not tolerance.is_return(end):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if has_failed_elsewhere(ends) or self._are_left_over(alive, tolerance):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            time.sleep(POLL_SECONDS if alive else 0)
        return ends

    def interrupt(self, *, everyone: bool) -> None:
        alive = [rank for rank in self._ranks.values() if rank.poll() is None]
        for rank in alive if everyone else alive[:1]:
            rank.send_signal(signal.SIGINT)

    def end(self) -> None:
        for rank in self._ranks.values():
            if rank.poll() is None:
                rank.kill()
        for rank in self._ranks.values():
            rank.wait()
        self._port.close()

    def _poll(self, rank: int) -> End | None:
        code = self._ranks[rank].poll()
        if code is None:
            return None
        return End(rank, code, time.time() - POLL_SECONDS, 1 + self._restarts[rank], has_joined(self._folder, rank))

    def _are_left_over(self, alive: Set[int], tolerance: Tolerance) -> bool:
        """Whether rank 0 has ended here, and those that have not were started again and can be done without."""
        has_led = 0 in self._numbers and 0 not in alive
        return has_led and all(rank in tolerance.expendable and self._restarts[rank] for rank in alive)

    def _is_missed(self, end: End, tolerance: Tolerance, *, leads: bool) -> bool:
        """Whether the rank is started again; one that can be done without only while rank 0 is there."""
        num_returns = sum(self._restarts[one] for one in tolerance.expendable)
        return tolerance.restores(end, self._restarts[end.rank]) or (leads and tolerance.takes_back(end, num_returns))

    def _start(self, rank: int) -> Process:
        environment = {
            **os.environ,
            **self._variables(rank),
            "WEFT_RANK": str(rank),
            "WEFT_SIZE": str(self._num_ranks),
            "WEFT_STARTER": str(os.getpid()),
            "OMP_NUM_THREADS": str(threads_per_rank(len(self._numbers))),
        }
        forked = fork_rank(self._folder, environment) if self._forks else None
        return forked or _start_plain(self._folder, environment)

    def _tell_local(self, rank: int) -> dict[str, str]:
        port = self._port.getsockname()[1]
        return {**rank_variables(rank, self._num_ranks, port), "WEFT_MEETING": str(self._folder)}


def _start_plain(folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # A session of its own, so that the terminal's Ctrl-C reaches this process alone, which passes it on.
    return subprocess.Popen(
        [sys.executable, "-m", "weft.engines.rank_process", str(folder)],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
