"""The known causes for which a script's ranks differ from one process, found in traces: pure functions.

    unshared batches    every rank was given the same batch, or made one of its own
    summed loss         one process's gradient is the ranks' sum:     g = g_0 + g_1 + ...
    tokens              it is a mean of them with other weights:      g = w_0 g_0 + w_1 g_1 + ..., sum of w = 1
    batch norm          statistics are those of a rank's samples      (found by an experiment alone)
    random numbers      masks and noise are every rank's own          (found by an experiment alone)

Weights are fitted to the first backward, where parameters are still the same everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.distributed.script.observation.tracing import Counted
from weft.proving.script_trace import ScriptTrace

__all__ = [
    "BATCH_NORM",
    "EQUAL_RANDOM",
    "SUMMED",
    "Cause",
    "are_weights",
    "draws_equally",
    "find_counts",
    "find_unshared",
    "fit_weights",
    "is_mean",
    "is_sum",
    "tokens",
]

NEAR, NEARER = 1e-2, 1e-3


@dataclass(frozen=True)
class Cause:
    """A cause that fits: its name, what speaks for it, and what to do."""

    name: str
    fact: str
    cure: str

    def __str__(self) -> str:
        return f"{self.name}: {self.fact}; {self.cure}"


SUMMED = Cause("summed loss", "the loss adds up over its samples, and ranks averaged it", 'give weave loss="sum"')
BATCH_NORM = Cause(
    "batch norm", "a rank normalises by the statistics of its own samples", 'give weave batch_norm="global"'
)
EQUAL_RANDOM = Cause(
    "equal random masks",
    "all ranks draw the same random numbers, each for other samples",
    "do not seed after weave, or add weft.rank to the seed",
)


def tokens(counted: Counted | None, weights: Sequence[float]) -> Cause:
    """The loss is a mean over something else than samples."""
    shares = ", ".join(f"{weight:.3f}" for weight in weights)
    what = f"the {counted}" if counted else "something that is not in the batches"
    cure = "give weave weight=, a function that counts what the loss of a batch is a mean over"
    return Cause("tokens", f"the loss is a mean over {what} (shares of the ranks: {shares})", cure)


def find_unshared(ranks: Sequence[ScriptTrace], reference: ScriptTrace) -> Cause | None:
    """Whether the ranks of the first step computed the same, or batches that one process does not have."""
    if len(ranks) == 1 or not reference.num_steps or any(not trace.num_steps for trace in ranks):
        return None
    rows, whole = [trace.facts.rows[0] for trace in ranks], reference.facts.rows[0]
    cure = "give weave the loader and iterate over what it returns, or cut batches made by hand with weft.share"
    if whole > 1 and len({trace.facts.inputs[0] for trace in ranks}) == 1 and rows[0] >= whole:
        return Cause("unshared batches", f"every rank was given the same batch (rows: {rows[0]})", cure)
    if whole > 1 and sum(rows) >= len(ranks) * whole and not any(trace.facts.num_batches for trace in ranks):
        fact = f"every rank makes batches of its own (rows of the ranks: {sum(rows)}, of one process: {whole})"
        return Cause("unshared batches", fact, cure)
    return None


def draws_equally(ranks: Sequence[ScriptTrace]) -> bool:
    """Whether models draw the same random numbers on all ranks in a step."""
    num_steps = min(trace.num_steps for trace in ranks)
    return any(
        all(trace.facts.model_draws[step] for trace in ranks)
        and len({trace.facts.random_states[step] for trace in ranks}) == 1
        for step in range(num_steps)
    )


def fit_weights(ranks: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]) -> tuple[list[float], float]:
    """The weights with which the ranks' gradients add up to the whole one as nearly as can be, and what is left, as a
    share of the whole one's length.

    >>> fit_weights([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}], {"w": torch.tensor([1.0, 1.0])})
    ([1.0, 0.5], 0.0)
    """
    columns = torch.stack([_vector(found, whole) for found in ranks], dim=1)
    target = _vector(whole, whole)
    weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    length = float(target.norm())
    left = float((columns @ weights - target).norm()) / length if length else float("inf")
    return weights.tolist(), left


def is_sum(weights: Sequence[float], left: float) -> bool:
    return left < NEAR and all(abs(weight - 1) < NEAR for weight in weights)


def is_mean(weights: Sequence[float], left: float) -> bool:
    return left < NEAR and abs(sum(weights) - 1) < NEAR


def are_weights(ranks: Sequence[ScriptTrace], weights: Sequence[float]) -> bool:
    """Whether these are the weights that the ranks had already."""
    return all(abs(trace.facts.weight - weight) < NEARER for trace, weight in zip(ranks, weights, strict=True))


def find_counts(ranks: Sequence[ScriptTrace], weights: Sequence[float]) -> Counted | None:
    """A way to count targets by which the ranks' first batches have these weights; the nearest."""
    counts = [{Counted(**way): number for way, number in trace.facts.counts} for trace in ranks]
    best, nearest = None, NEARER
    for way in counts[0]:
        numbers = [own.get(way, 0) for own in counts]
        total = sum(numbers)
        off = max(abs(n / total - w) for n, w in zip(numbers, weights, strict=True)) if total else 1.0
        if off < nearest:
            best, nearest = way, off
    return best


def _vector(found: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([found.get(name, torch.zeros_like(like)).flatten().double() for name, like in names.items()])
