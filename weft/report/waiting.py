"""Which share of its time each rank of a simulated run waited."""

import math
from collections.abc import Sequence
from statistics import fmean, quantiles

from weft.records.record import Repetition

__all__ = ["idle_rows", "idle_shares"]

MOST_RANKS_SHOWN = 8


def idle_shares(repetitions: Sequence[Repetition]) -> list[float]:
    """Of each rank, a mean over the trainings; nan of one that died."""
    series = [repetition.series["idle_share"] for repetition in repetitions if "idle_share" in repetition.series]
    return [fmean(shares) for shares in zip(*series, strict=False)]


def idle_rows(shares: Sequence[float]) -> list[tuple[str, str]]:
    """Every rank of a few; of many the two at either end, quartiles between them, and who died.

    >>> idle_rows([0.25, math.nan])
    [('rank 0', '25.0%'), ('rank 1', 'died')]
    """
    if len(shares) <= MOST_RANKS_SHOWN:
        return [_row(rank, share) for rank, share in enumerate(shares)]
    order = sorted((share, rank) for rank, share in enumerate(shares) if not math.isnan(share))
    alive = [_row(rank, share) for share, rank in order]
    dead = [str(rank) for rank, share in enumerate(shares) if math.isnan(share)]
    lost = [("died", f"rank{'s' if len(dead) > 1 else ''} {', '.join(dead)}")] if dead else []
    if len(alive) <= MOST_RANKS_SHOWN:
        return [*alive, *lost]
    cuts = quantiles([share for share, _ in order], n=4, method="inclusive")
    between = [(name, f"{cut:.1%}") for name, cut in zip(("quartile", "median", "quartile"), cuts, strict=True)]
    return [*alive[:2], *between, *alive[-2:], *lost]


def _row(rank: int, share: float) -> tuple[str, str]:
    return f"rank {rank}", "died" if math.isnan(share) else f"{share:.1%}"
