"""How often each whole number came, as lines of text: how stale the updates of a run were."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from weft.report.table import aligned, section

__all__ = ["Histogram", "added", "binned"]

MOST_BINS = 10
BAR_LENGTH = 24
SHOWN = 0.99  # what is beyond is one bin: a long tail would leave one to all the others


@dataclass(frozen=True)
class Histogram:
    """A line for each bin: the numbers, how often they came, which share that is, and a bar."""

    title: str
    counts: Sequence[int]  # of 0, 1, 2, ...

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield section(self.title, histogram_lines(self.counts, "#" if options.ascii_only else "█"))


def added(series: Iterable[Sequence[float]]) -> list[int]:
    """The counts of several trainings together.

    >>> added([(1.0, 2.0), (3.0,)])
    [4, 2]
    """
    return [int(sum(column)) for column in zip_longest(*series, fillvalue=0.0)]


def binned(counts: Sequence[int], most: int = MOST_BINS) -> list[tuple[str, int]]:
    """At most so many bins of equal width, and one for what is beyond.

    >>> binned([5, 0, 1]), binned([10] * 99 + [0] * 20 + [1], most=3)
    ([('0', 5), ('1', 0), ('2', 1)], [('0 to 32', 330), ('33 to 65', 330), ('66 to 98', 330), ('99 or more', 1)])
    """
    reach = _reach(counts)
    width = -(-reach // most)
    bins = [(first, first + width - 1) for first in range(0, reach, width)]
    rows = [(str(a) if a == b else f"{a} to {b}", sum(counts[a : b + 1])) for a, b in bins]
    beyond = bins[-1][1] + 1
    return [*rows, (f"{beyond} or more", sum(counts[beyond:]))] if any(counts[beyond:]) else rows


def histogram_lines(counts: Sequence[int], mark: str) -> list[Text]:
    total, rows = sum(counts), binned(counts)
    highest = max(count for _, count in rows)
    bars = [mark * round(BAR_LENGTH * count / highest) for _, count in rows]
    cells = [(name, f"{count:,}", f"{count / total:.1%}", bar) for (name, count), bar in zip(rows, bars, strict=True)]
    return aligned("lrrl", cells)


def _reach(counts: Sequence[int]) -> int:
    """How many numbers from 0 on are shown one by one, or in bins of equal width: all, unless they are many."""
    if len(counts) <= MOST_BINS:
        return len(counts)
    seen, total = 0, sum(counts)
    for number, count in enumerate(counts):
        seen += count
        if seen >= SHOWN * total:
            return number + 1
    return len(counts)
