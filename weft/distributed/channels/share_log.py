"""The journal of measured shares: speeds that ranks agreed on, noted by rank 0, and read back to repeat a run.

RUN/decisions/seed-0/shares.jsonl
  {"format": 1, "plan": "data=3 share=measured(every=20)", "seed": 0, "steps": 0}
  ["speeds", 20, 1000, 1000, 504]       from step 20 on, of every replica
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import final

from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.consistency.control import Journal, encode, journal_file, read_events
from weft.distributed.group.clock import AbstractClock
from weft.distributed.placement.shares import MeasuredShares, Speeds
from weft.errors import StorageError
from weft.specs import Mesh, Plan

__all__ = ["ShareJournal", "measured_shares", "read_speeds"]

NAME, SUBJECT = "shares", "shares that ranks agreed on"


def read_speeds(run: Path, seed: int) -> dict[int, Speeds]:
    """The speeds of a run, by the steps from which on they counted.

    Raises:
        RunFolderError: the run recorded nothing, or nothing that can be repeated.
    """
    events = read_events(journal_file(run, seed, NAME), SUBJECT, (Speeds,), begun="steps")
    return {event.step: event for event in events}


@final
class ShareJournal:
    """Of the trainings of one run, one after the other."""

    def __init__(self, plan: Plan, rank: int, spec: RunSpec) -> None:
        self._plan = plan
        self._rank = rank
        self._spec = spec
        self._seeds: Iterator[int] = iter(spec.seeds)
        self._path: Path | None = None

    def begin(self, step: int) -> Mapping[int, Speeds] | None:
        seed, spec = next(self._seeds), self._spec
        self._path = journal_file(spec.run, seed, NAME) if spec.run is not None and self._rank == 0 else None
        Journal(self._path, {"plan": str(self._plan), "seed": seed, "steps": step}).close()
        if spec.replay is None:
            return None
        recorded = read_speeds(spec.replay, seed)
        for speeds in recorded.values():
            self.note(speeds)
        return recorded

    def note(self, speeds: Speeds) -> None:
        """Seldom: the file is opened for each, and nobody has to close it."""
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(encode(speeds)) + "\n")
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"shares could not be written ({self._path}: {reason}); free space") from error


def measured_shares(plan: Plan, mesh: Mesh, clock: AbstractClock, spec: RunSpec) -> MeasuredShares | None:
    """The shares of a plan that measures them; None where they are equal."""
    if plan.measured_every is None or plan.num_replicas == 1:
        return None
    return MeasuredShares(mesh, plan.measured_every, clock, ShareJournal(plan, mesh.rank, spec))
