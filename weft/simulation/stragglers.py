"""Ranks that are slow and ranks that fail, in words, for the virtual cluster.

    --stragglers    1 in 20 steps 5x slower     every rank: a step takes 5 times as long, with probability 1/20
                    rank 3 2x slower            always
                    steps from FILE             every step takes one of the seconds in FILE, over their median; FILE has
                                                a number a line, or is the folder of a run, whose steps are taken
                    rank 3 steps from FILE      only those of this rank
    --fail          rank 3 at 40 s              the rank is gone for good

Several of a kind are separated by commas, and their factors are multiplied. What happens to a rank in a step is drawn
by hashing (seed, rank, step): the same for every plan that is tried, and every time. `pace.py` says how steps count.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from weft.distributed.group.faulty import Kill
from weft.errors import UsageError
from weft.records.record_file import read_record
from weft.training.datasets.draws import uniform

__all__ = [
    "Drawn",
    "Occasional",
    "Slow",
    "Straggler",
    "check_ranks",
    "parse_failures",
    "parse_stragglers",
    "slowness",
]

NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Occasional:
    """Any rank in any step, with this probability."""

    probability: float
    factor: float

    def __str__(self) -> str:
        return f"steps are {self.factor:g}x slower with probability {self.probability:g}"

    def slowness(self, rank: int, draw: float) -> float:
        return self.factor if draw < self.probability else 1.0


@dataclass(frozen=True)
class Slow:
    """One rank in every step."""

    rank: int
    factor: float

    def __str__(self) -> str:
        return f"rank {self.rank} is {self.factor:g}x slower"

    def slowness(self, rank: int, draw: float) -> float:
        return self.factor if rank == self.rank else 1.0


@dataclass(frozen=True)
class Drawn:
    """Any rank, or one alone, takes in any step one of these, all equally likely."""

    factors: tuple[float, ...]
    rank: int | None = None

    def __str__(self) -> str:
        whose = "steps" if self.rank is None else f"steps of rank {self.rank}"
        return f"{whose} are drawn from {len(self.factors)} that were measured"

    def slowness(self, rank: int, draw: float) -> float:
        return self.factors[int(draw * len(self.factors))] if self.rank in (None, rank) else 1.0


Straggler = Occasional | Slow | Drawn


def slowness(stragglers: Sequence[Straggler], seed: int, rank: int, step: int) -> float:
    """How many times as long as usual the rank takes for the step.

    >>> slowness(parse_stragglers("rank 3 2x slower, rank 3 3x slower"), seed=0, rank=3, step=0)
    6.0
    """
    draws = (uniform(seed, rank, step, number).item() for number in range(len(stragglers)))
    return math.prod(one.slowness(rank, draw) for one, draw in zip(stragglers, draws, strict=True))


def parse_stragglers(text: str) -> tuple[Straggler, ...]:
    """The stragglers that a text means.

    >>> parse_stragglers("1 in 20 steps 5x slower")
    (Occasional(probability=0.05, factor=5.0),)
    """
    return tuple(_parse_straggler(clause.strip()) for clause in text.split(","))


def _parse_straggler(clause: str) -> Straggler:
    if match := re.fullmatch(rf"(\d+) in (\d+) steps? {NUMBER}x slower", clause):
        count, out_of = int(match[1]), int(match[2])
        if not 0 < count <= out_of:
            raise UsageError(f"more slow steps than steps, or none ({clause}); write 1 in 20 steps 5x slower")
        return Occasional(count / out_of, _factor(match[3], clause))
    if match := re.fullmatch(rf"rank (\d+) {NUMBER}x slower", clause):
        return Slow(int(match[1]), _factor(match[2], clause))
    if match := re.fullmatch(r"(?:rank (\d+) )?steps from (.+)", clause):
        return Drawn(_read_factors(Path(match[2])), None if match[1] is None else int(match[1]))
    raise UsageError(
        f"stragglers are not understood ({clause}); "
        "write '1 in 20 steps 5x slower', 'rank 3 2x slower', 'steps from FILE' or 'rank 3 steps from FILE'"
    )


def _factor(text: str, clause: str) -> float:
    if float(text) < 1:
        raise UsageError(f"a straggler is faster than the others ({clause}); give 1 or more")
    return float(text)


def _read_factors(path: Path) -> tuple[float, ...]:
    """The seconds in a file, or of the steps of a run, over their median."""
    seconds = _steps_of_run(path) if path.is_dir() else _read_numbers(path)
    if not seconds or not all(math.isfinite(second) and second > 0 for second in seconds):
        raise UsageError(f"file has no seconds of steps ({path}); give one number above zero a line")
    middle = median(seconds)
    return tuple(second / middle for second in seconds)


def _steps_of_run(path: Path) -> list[float]:
    return [second for repetition in read_record(path).repetitions for second in repetition.series.get("step_time", ())]


def _read_numbers(path: Path) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [float(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    except OSError as error:
        raise UsageError(f"file of step times could not be read ({path}: {error.strerror}); give another") from None
    except ValueError as error:
        raise UsageError(f"file of step times holds something else ({path}: {error}); give one number a line") from None


def parse_failures(text: str, num_ranks: int) -> tuple[Kill, ...]:
    """The deaths that a text means.

    >>> parse_failures("rank 3 at 40 s", num_ranks=4)
    (Kill(rank=3, at_call=None, after_seconds=40.0),)
    """
    kills = []
    for clause in (part.strip() for part in text.split(",")):
        match = re.fullmatch(rf"rank (\d+) at {NUMBER} ?s", clause)
        if not match:
            raise UsageError(f"failure is not understood ({clause}); write 'rank 3 at 40 s'")
        if int(match[1]) >= num_ranks:
            raise UsageError(f"no such rank can fail (rank: {match[1]}, ranks: {num_ranks}); ranks count from 0")
        kills.append(Kill(int(match[1]), after_seconds=float(match[2])))
    return tuple(kills)


def check_ranks(stragglers: Sequence[Straggler], num_ranks: int) -> None:
    """Refuse a straggler that is not among the ranks: it would slow nobody down."""
    for straggler in stragglers:
        rank = None if isinstance(straggler, Occasional) else straggler.rank
        if rank is not None and rank >= num_ranks:
            raise UsageError(f"no such rank can be slow (rank: {rank}, ranks: {num_ranks}); count from 0")
