"""Ranks on several hosts: the same command on each starts its own, and all end together.

    host 0  weft launch ... --host-rank 0      ranks 0, 1      keeps the store where launchers and ranks meet
    host 1  weft launch ... --host-rank 1      ranks 2, 3

Each launcher looks after its own ranks, and tells the others when one has failed. All of them end with the same error.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import final

from weft.atomic import write_json
from weft.engines.engine import STRICT, AbstractEngine, AbstractRanks, End, Tolerance
from weft.engines.failure import Failure
from weft.engines.host_notes import HostNotes, Phase, RankFailure, meet
from weft.engines.local import LocalRanks, rank_variables
from weft.engines.rank_program import has_result, read_failure
from weft.engines.rendezvous import POLL_SECONDS, Rendezvous
from weft.errors import TrainingError, UsageError

__all__ = ["HostsEngine", "Rendezvous"]

# How long launchers wait for each other once a rank has failed: longer than ranks have to notice it.
AGREE_SECONDS = 10.0
LEAVE_SECONDS = 5.0


@final
class HostsEngine(AbstractEngine):
    """Starts this host's part of the ranks of a launch on several hosts, when all hosts have come.

    Args:
        launch: what must be the same on all hosts, in words.
    """

    def __init__(self, rendezvous: Rendezvous, launch: str) -> None:
        self._rendezvous, self._launch = rendezvous, launch

    def start(self, folder: Path, num_ranks: int) -> "HostsRanks":
        num_hosts = self._rendezvous.num_hosts
        if num_ranks % num_hosts:
            cure = "give --workers or a plan whose processes are a multiple of the hosts"
            raise UsageError(f"hosts would have different numbers of ranks ({num_ranks} on {num_hosts} hosts); {cure}")
        notes = meet(self._rendezvous, f"{self._launch}, {num_hosts} hosts, {num_ranks} processes")
        ranks = HostsRanks(folder, num_ranks, self._rendezvous, notes)
        try:
            ranks.start()
        except BaseException:
            ranks.end()
            raise
        return ranks


@final
class HostsRanks(AbstractRanks):
    """The ranks of this host, and what is known of those of the others."""

    def __init__(self, folder: Path, num_ranks: int, rendezvous: Rendezvous, notes: HostNotes) -> None:
        self._folder, self._rendezvous, self._notes = folder, rendezvous, notes
        self._num_ranks = num_ranks
        self._local_size = num_ranks // rendezvous.num_hosts
        first = rendezvous.host_rank * self._local_size
        numbers = range(first, first + self._local_size)
        self._interface = _find_interface(rendezvous)
        self._local = LocalRanks(folder, num_ranks, numbers=numbers, variables=self._tell)

    def start(self) -> None:
        self._local.start()

    def wait(self, tolerance: Tolerance) -> list[End]:
        """All hosts wait for the last of them, and learn of each other's failures."""
        ends = self._local.watch(STRICT, self._look)
        self._local.end()
        failures = self._failures_of(ends)
        self._notes.tell("ended", failures)
        self._await_others(["ended", "left"], AGREE_SECONDS, is_over=bool(failures))
        return ends + self._take_failures()

    def interrupt(self, *, everyone: bool) -> None:
        self._local.interrupt(everyone=everyone)

    def end(self) -> None:
        """Host 0 keeps the store until the others have read it."""
        self._local.end()
        self._notes.tell("left")
        if self._rendezvous.host_rank == 0:
            self._await_others(["left"], LEAVE_SECONDS, is_over=True)
        self._notes.close()

    def _look(self, ends: Sequence[End]) -> bool:
        """Tell the others how ranks have failed here; whether one has, here or elsewhere."""
        failures = self._failures_of(ends)
        if failures:
            self._notes.tell("running", failures)
        return bool(failures or self._notes.failures) or self._notes.find_lost() is not None

    def _await_others(self, phases: Sequence[Phase], seconds: float, *, is_over: bool) -> None:
        """Wait until all other hosts are in one of these phases; so long only from when the run is over, because a rank
        has failed somewhere."""
        deadline = float("inf")
        while not self._notes.are_others_in(phases) and time.monotonic() < deadline:
            if is_over or self._look(()):
                deadline = min(deadline, time.monotonic() + seconds)
            time.sleep(POLL_SECONDS)

    def _failures_of(self, ends: Sequence[End]) -> list[RankFailure]:
        """A rank that exits with 0 before its time has failed too: it leaves no result."""
        failed = [end for end in ends if end.code or not has_result(self._folder, end.rank)]
        return [RankFailure(end.rank, end.code, end.moment, read_failure(self._folder, end.rank)) for end in failed]

    def _take_failures(self) -> list[End]:
        """The failures of other hosts, as if their ranks had been here."""
        failures = self._notes.failures
        lost = self._notes.find_lost()
        if lost is not None:
            failures.append(self._describe_lost(*lost))
        for failure in failures:
            if failure.told is not None:
                write_json(self._folder / f"failure-{failure.rank}.json", asdict(failure.told))
        return [End(failure.rank, failure.code, failure.moment) for failure in failures]

    def _describe_lost(self, host: int, reason: str) -> RankFailure:
        rank, moment, code = host * self._local_size, time.time(), TrainingError.exit_code
        text = f"host {host} of {self._rendezvous.num_hosts} is lost: {reason}; look at its own output"
        return RankFailure(rank, code, moment, Failure(rank, moment, "HostLost", text, "", code, is_witness=False))

    def _tell(self, rank: int) -> dict[str, str]:
        address, port = self._rendezvous.address, self._rendezvous.port
        num_hosts = self._rendezvous.num_hosts
        # For process groups of the script's own too: left to itself, Gloo takes what the host's name stands for.
        interface = {"GLOO_SOCKET_IFNAME": self._interface} if self._interface else {}
        return {
            **interface,
            **rank_variables(rank, self._num_ranks, port, address=address, num_hosts=num_hosts),
            "WEFT_RENDEZVOUS": str(self._rendezvous),
            "WEFT_LOCAL_RANK": str(rank % self._local_size),
            "WEFT_LOCAL_SIZE": str(self._local_size),
        }


def _find_interface(rendezvous: Rendezvous) -> str | None:
    from weft.distributed.place.interface import INTERFACE_VARIABLE, find_route

    return os.environ.get(INTERFACE_VARIABLE) or find_route(rendezvous.address)
