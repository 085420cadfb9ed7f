"""Metrics of a data set and its sampler: bias of the labels, order of the samples, epochs that repeat."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import UsageError

__all__ = ["LabelBias", "dataset_bias", "epoch_correlation", "sampler_order"]

Indices = Sequence[int] | NDArray[Any] | Tensor


@dataclass(frozen=True)
class LabelBias:
    """How many samples each class has, and how far that is from the same number for all."""

    counts: tuple[int, ...]
    distance: float


def dataset_bias(labels: Indices, num_classes: int | None = None) -> LabelBias:
    """Total variation distance between the distribution of the labels and the uniform one.

        distance = 1/2 * sum over classes c of |n_c / n - 1 / num_classes|

    It is the share of samples that would need another label: 0 is balanced, 1 - 1 / num_classes is one class only.
    Give `num_classes` where a class may have no sample at all.

    >>> dataset_bias([0, 0, 0, 1])
    LabelBias(counts=(3, 1), distance=0.25)
    """
    flat = np.asarray(labels).reshape(-1)
    if flat.size == 0:
        raise UsageError("no labels to take the bias of; give at least one")
    if flat.min() < 0 or (num_classes is not None and flat.max() >= num_classes):
        raise UsageError(
            f"label outside the classes (lowest: {flat.min()}, highest: {flat.max()}, classes: {num_classes})"
        )
    counts = np.bincount(flat, minlength=num_classes or 0)
    distance = 0.5 * np.abs(counts / flat.size - 1 / counts.size).sum()
    return LabelBias(tuple(counts.tolist()), float(distance))


def sampler_order(indices: Indices) -> float:
    """The share of pairs that come in descending order, in O(n log^2 n).

    0 is ascending, about 0.5 shuffled, 1 descending. Pairs of equal indices have no order and are left out.

    >>> sampler_order([0, 1, 2, 3]), sampler_order([3, 2, 1, 0]), round(sampler_order([1, 2, 0]), 3)
    (0.0, 1.0, 0.667)
    """
    order = np.asarray(indices).reshape(-1)
    _, ranks, repeats = np.unique(order, return_inverse=True, return_counts=True)
    num_pairs = order.size * (order.size - 1) / 2
    num_ordered = num_pairs - (repeats * (repeats - 1) / 2).sum()
    if num_ordered == 0:
        return 0.0
    # Kendall's tau-b is (ascending - descending) / sqrt(pairs * ordered pairs), as the positions hold no ties.
    tau = (num_ordered - 2 * _count_descending(ranks)) / np.sqrt(num_pairs) / np.sqrt(num_ordered)
    tau = np.clip(tau, -1.0, 1.0)
    return float(np.clip(0.5 - 0.5 * tau * np.sqrt(num_pairs / num_ordered), 0.0, 1.0))  # rounding may pass the ends


def _count_descending(ranks: NDArray[np.intp]) -> int:
    """Pairs in descending order. Written here because scipy.stats takes a second to import, which every run would pay.

    Two numbers differ first in one bit: from the highest down, among those that are alike above the bit, each 0 comes
    after so many 1s.
    """
    count = 0
    for bit in reversed(range(int(ranks.max()).bit_length())):
        above, is_one = ranks >> (bit + 1), (ranks >> bit) & 1
        ones_before = np.cumsum(is_one) - is_one
        starts = np.flatnonzero(np.r_[True, above[1:] != above[:-1]])
        of_others = np.repeat(ones_before[starts], np.diff(np.r_[starts, ranks.size]))
        count += int((ones_before - of_others)[is_one == 0].sum())
        ranks = ranks[np.argsort(ranks >> bit, kind="stable")]
    return count


def epoch_correlation(epochs: Sequence[Indices]) -> float:
    """The strongest link between the orders of two epochs: near 0 where each is shuffled anew, 1 where one repeats.

    Compared are the orders, and also the moves that lead from each epoch to the next: a sampler that applies one
    permutation again and again never shows the same order twice, but makes the same move every time. Independent orders
    of n samples give about 1 / sqrt(n), a few times that among many epochs.

    Args:
        epochs: two or more orders of the same number of indices.
    """
    orders = [np.asarray(epoch).reshape(-1) for epoch in epochs]
    lengths = {order.size for order in orders}
    if len(orders) < 2 or len(lengths) != 1 or min(lengths) < 2:
        raise UsageError(
            f"epochs cannot be compared (epochs: {len(orders)}, lengths: {sorted(lengths)}); give equal ones"
        )
    links = [_strongest_link(orders)]
    if len(orders) > 2 and all(np.array_equal(np.sort(order), np.sort(orders[0])) for order in orders):
        links.append(_strongest_link([_move(a, b) for a, b in pairwise(orders)]))
    return max(links)


def _strongest_link(orders: list[NDArray[Any]]) -> float:
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = np.abs(np.corrcoef(np.stack(orders)))
    pairs = correlation[np.triu_indices(len(orders), k=1)]
    return float(np.nan_to_num(pairs, nan=1.0).max())  # one and the same index all along repeats, whatever comes next


def _move(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
    """For every position after, the position before of the same sample."""
    return np.argsort(before, kind="stable")[np.argsort(np.argsort(after, kind="stable"), kind="stable")]
