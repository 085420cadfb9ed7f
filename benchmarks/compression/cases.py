"""The cases that are compared, and the ratios by which they are judged.

free                      ranks that do not communicate: what a step would take if communication cost nothing
ddp                       DistributedDataParallel over Gloo, dense
ddp_fp16, ddp_bf16        with PyTorch's own hooks
ddp_powersgd(1)           PowerSGD of rank 1, and so on
ddp_batched_powersgd(1)
anything else             a plan, carried out by `weft launch` on a woven script
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from weft.metrics.statistics import Interval, ratio_interval, summarise

__all__ = ["HOOKS", "PEERS", "Hook", "parse_hook", "rows_of"]

HOOKS = ("", "fp16", "bf16", "powersgd", "batched_powersgd")

PEERS = (
    "free",
    "ddp",
    "ddp_fp16",
    "ddp_bf16",
    "ddp_powersgd(1)",
    "ddp_powersgd(2)",
    "ddp_powersgd(4)",
    "ddp_batched_powersgd(1)",
    "ddp_batched_powersgd(2)",
)
"""The cases that are always there, unless others are named."""


@dataclass(frozen=True)
class Hook:
    """A communication hook of DDP; `rank` is that of PowerSGD's matrices."""

    name: str
    rank: int = 1


def parse_hook(case: str) -> Hook | None:
    """The hook that a case names; None where it is not one of DDP.

    >>> parse_hook("ddp_powersgd(4)"), parse_hook("ddp").name, parse_hook("data=4")
    (Hook(name='powersgd', rank=4), '', None)
    """
    found = re.fullmatch(r"ddp(?:_([a-z]\w*?))?(?:\((\d+)\))?", case)
    if found is None:
        return None
    if (found[1] or "") not in HOOKS:
        raise ValueError(f"unknown hook ({case}); use one of {', '.join(PEERS)}")
    return Hook(found[1] or "", int(found[2] or 1))


def rows_of(workload: str, link: str, rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: the median step, bytes on the wire for each rank and step, and its ratios.

    Args:
        workload: that was trained.
        link: of the hosts.
        rounds: for each case, what each round measured at rank 0: `seconds` of every step, `sent` and `received` bytes.
    """
    steps = {
        case: [float(one) for found in all_rounds for one in found["seconds"]] for case, all_rounds in rounds.items()
    }
    hooks = [case for case in steps if (hook := parse_hook(case)) and hook.name]
    best = min(hooks, key=lambda case: median(steps[case])) if hooks else ""
    dense, free = steps.get("ddp"), steps.get("free")
    rows = []
    for case, seconds in steps.items():
        row = {"workload": workload, "link": link, "case": case, "seconds per step": median(seconds)}
        row["interval_of_step"] = _ends(summarise(seconds).interval)
        row["MB sent"] = _bytes_per_step(rounds[case], "sent") / 1e6
        row |= _ratio("times as fast as DDP", dense, seconds)
        row |= _ratio("share of free communication", free, seconds)
        row |= _ratio("times as fast as the best hook", steps.get(best), seconds)
        rows.append({**row, "raw_rounds": [dict(found) for found in rounds[case]]})
    return rows


def _ratio(name: str, others: Sequence[float] | None, seconds: Sequence[float]) -> dict[str, Any]:
    """Of the medians of what another case took and of what this one did, with its interval; none without the other."""
    if not others:
        return {name: None}
    return {name: median(others) / median(seconds), f"interval_of_{name}": _ends(ratio_interval(others, seconds))}


def _ends(interval: Interval) -> list[float] | None:
    return [interval.low, interval.high] if interval.is_known else None


def _bytes_per_step(rounds: Sequence[Mapping[str, Any]], direction: str) -> float:
    total: int = sum(found[direction] for found in rounds)
    return total / sum(len(found["seconds"]) for found in rounds)
