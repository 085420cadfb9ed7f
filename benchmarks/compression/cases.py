"""The cases that are compared, and the ratios by which they are judged.

free                      ranks that do not communicate: what a step would take if communication cost nothing
ddp                       DistributedDataParallel over Gloo, dense
ddp_fp16, ddp_bf16        with PyTorch's own hooks
ddp_powersgd(1)           PowerSGD of rank 1, and so on
ddp_batched_powersgd(1)
anything else             a plan, carried out by `weft launch` on a woven script
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def rows_of(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: the median step, bytes on the wire for each rank and step, and its ratios.

    Args:
        rounds: for each case, what each round measured at rank 0: `seconds` of every step, `sent` and `received` bytes.
    """
    medians = {case: _median_step(found) for case, found in rounds.items()}
    dense, free = medians.get("ddp"), medians.get("free")
    hooks = [seconds for case, seconds in medians.items() if (hook := parse_hook(case)) and hook.name]
    rows = []
    for case, seconds in medians.items():
        faster = dense / seconds if dense else None
        row = {
            "case": case,
            "seconds_per_step": seconds,
            "sent_bytes_per_step": _bytes_per_step(rounds[case], "sent"),
            "received_bytes_per_step": _bytes_per_step(rounds[case], "received"),
            "times_faster_than_ddp": faster,
            "share_of_free_communication": faster / (dense / free) if faster and dense and free else None,
            "times_faster_than_best_hook": min(hooks) / seconds if hooks else None,
            "raw": [dict(found) for found in rounds[case]],
        }
        rows.append(row)
    return rows


def _median_step(rounds: Sequence[Mapping[str, Any]]) -> float:
    steps: list[float] = [seconds for found in rounds for seconds in found["seconds"]]
    return statistics.median(steps)


def _bytes_per_step(rounds: Sequence[Mapping[str, Any]], direction: str) -> float:
    total: int = sum(found[direction] for found in rounds)
    return total / sum(len(found["seconds"]) for found in rounds)
