"""Systems that take turns in the same ranks: the parts that all benchmarks of placement have in common.

round 0     barrier | weft weft | barrier | peer peer | barrier | other other |      the slowest rank counts
round 1     barrier | peer peer | barrier | other other | barrier | weft weft |      another is first
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from weft.atomic import write_json
from weft.distributed.group import AbstractGroup
from weft.distributed.place import find_launch, open_group
from weft.metrics.comparison import compare_pairs
from weft.metrics.metric import METRICS
from weft.metrics.statistics import summarise
from weft.records.machine import describe_machine, describe_source, describe_versions
from weft.training.process import keep_freed_memory

__all__ = ["milliseconds", "open_rank", "raw_ms", "report", "slowest", "take_turns", "times_as_fast", "use_peers"]

MIN_ROUNDS = 6
"""An interval of the median needs as many values."""

RESULTS = Path(__file__).parent.parent / "results"


def open_rank() -> AbstractGroup:
    """This rank's group, and one thread."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return open_group(find_launch(), "shared_memory")


@contextmanager
def use_peers(group: AbstractGroup) -> Iterator[dict[str, Any]]:
    """Process groups of torch.distributed for all ranks, by backend: Gloo as users have it, and "weft"."""
    import torch.distributed as dist

    from weft.distributed.torch_backend import register

    register()
    store = f"file://{os.environ['WEFT_MEETING']}/peers"
    dist.init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    try:
        yield {"gloo": dist.group.WORLD, "weft": dist.new_group(backend="weft")}
    finally:
        dist.destroy_process_group()


def take_turns(
    group: AbstractGroup,
    steps: Mapping[str, Callable[[], object]],
    num_rounds: int,
    *,
    num_steps: int,
    after_turn: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds per step of each system, round by round. The first step of a turn, in which memory is fetched and ranks
    come together, is not timed."""
    names, values = list(steps), {name: list[float]() for name in steps}
    for number in range(num_rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            steps[name]()
            group.barrier()
            began = time.perf_counter()
            for _ in range(num_steps):
                steps[name]()
            values[name].append((time.perf_counter() - began) / num_steps)
            if after_turn is not None:
                after_turn(name)
    return values


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Of each system, round by round, the seconds of the rank that took longest."""
    return {name: [max(several) for several in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def milliseconds(seconds: Sequence[float]) -> list[float]:
    """The median and its interval (95%)."""
    summary = summarise([1e3 * value for value in seconds])
    return [round(x, 3) for x in (summary.median, summary.interval.low, summary.interval.high)]


def times_as_fast(other: Sequence[float], own: Sequence[float], bar: float | None = None) -> dict[str, Any]:
    """How many times as long the other takes, within rounds, with the interval (95%)."""
    found = compare_pairs(list(other), list(own), METRICS["step_time"])
    bounds = [round(found.interval.low, 3), round(found.interval.high, 3)]
    return {"ratio": round(found.ratio, 3), "interval": bounds, **({} if bar is None else {"bar": bar})}


def raw_ms(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(1e3 * value, 3) for value in seconds] for name, seconds in values.items()}


def report(
    title: str,
    name: str,
    measure: Callable[[int, argparse.Namespace], list[dict[str, Any]]],
    show: Callable[[dict[str, Any]], None],
    arguments: Sequence[str] | None,
    *,
    rounds: int = 12,
    ranks: int | None = None,
) -> None:
    """The command of a benchmark: measure so many rounds, show each row, and write them where they are asked for.

    Args:
        name: of the result file.
        ranks: how many there are unless `--ranks` says otherwise; None where they are fixed.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--rounds", type=int, default=rounds)
    if ranks is not None:
        parser.add_argument("--ranks", type=int, nargs="+", default=[ranks])
    parser.add_argument("--out", type=Path, help=f"write the results here, e.g. {RESULTS / f'{name}.json'}")
    options = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    rows = measure(max(MIN_ROUNDS, options.rounds), options)
    for row in rows:
        show(row)
    if options.out:
        about = {"date": date.today().isoformat(), "machine": describe_machine(), "load_before": load_before}
        versions = {"versions": describe_versions(), "source": describe_source()}
        write_json(options.out, {**about, **versions, "rows": rows})
