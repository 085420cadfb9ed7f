"""The journal of a cut: which layers each stage of a pipeline has, noted by rank 0, and read back to repeat a run.

RUN/decisions/seed-0/stages.jsonl
  {"format": 1, "plan": "data=1 pipeline=2 cut=time(stages=equal)", "seed": 0, "layers": [["tokens", ...], [...]]}
  ["stages", 0, 3]                      the first unit of each, of those between which the model can be cut
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from weft.distributed.channels.run_spec import RunSpec
from weft.distributed.consistency.control import Journal, journal_file, read_events
from weft.distributed.placement.pipeline import CutLog, Partition
from weft.specs import Mesh, Plan

__all__ = ["StageJournal", "Stages", "stage_log"]

NAME, SUBJECT = "stages", "where its model was cut"


@dataclass(frozen=True)
class Stages:
    """The number of the first unit of every stage, or of every chunk of them."""

    firsts: tuple[int, ...]


@final
class StageJournal:
    """Of the trainings of one run, one after the other."""

    def __init__(self, plan: Plan, rank: int, spec: RunSpec) -> None:
        self._plan = plan
        self._rank = rank
        self._spec = spec
        self._seeds: Iterator[int] = iter(spec.seeds)
        self._seed = 0

    def begin(self) -> Sequence[int] | None:
        """A cut that nothing measured is made again as it was."""
        self._seed = next(self._seeds, self._seed)
        is_measured = self._plan.measures_stages or self._plan.stage_costs == "time"
        if self._spec.replay is None or not is_measured:
            return None
        *_, found = read_events(journal_file(self._spec.replay, self._seed, NAME), SUBJECT, (Stages,), begun="steps")
        return found.firsts

    def note(self, cut: Partition) -> None:
        if self._spec.run is None or self._rank != 0:
            return
        about = {"plan": str(self._plan), "seed": self._seed, "layers": cut.layers}
        journal = Journal(journal_file(self._spec.run, self._seed, NAME), about)
        journal.note(Stages(cut.firsts))
        journal.close()


def stage_log(plan: Plan, mesh: Mesh, spec: RunSpec) -> CutLog | None:
    """The journal of a plan that cuts a model; None of one that does not."""
    return StageJournal(plan, mesh.rank, spec) if plan.pipeline > 1 else None
