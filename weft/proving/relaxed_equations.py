"""The equations of the relaxed schemes, on all replicas at once: what the ranks are held against.

Written from the papers, without groups, messages or schemes; only the graph of gossip, which has tests of its own, is
shared with what is judged.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.graphs import make_mixing
from weft.proving.compressed_sums import CompressedSum
from weft.proving.proof import clone
from weft.proving.reference import Replica
from weft.proving.rounding import EXACT, Rounding, round_all
from weft.specs.plan import Choice

__all__ = ["AbstractEquations", "ElasticEquations", "GossipEquations", "LocalEquations", "Weights"]

Weights = dict[str, Tensor]


class AbstractEquations(ABC):
    """The part of a scheme that is no rank's own: what one sees who sees all replicas at once.

    Args:
        sent: how numbers are rounded that are sent, or the sum that ranks receive of what they send.
    """

    def __init__(self, choice: Choice, replicas: Sequence[Replica], sent: Rounding | CompressedSum) -> None:
        self.choice = choice
        self.compressed = sent if isinstance(sent, CompressedSum) else None
        self.round = sent if isinstance(sent, Rounding) else EXACT
        self.replicas = replicas
        self.begin()

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def before_update(self, step: int) -> None: ...

    @abstractmethod
    def after_update(self, step: int, counts: Sequence[float]) -> None: ...


@final
class LocalEquations(AbstractEquations):
    """x_r <- z after every H steps, z = sum_r c_r x_r, c_r the mean share of rank r; or an outer step towards z.

    With a codec q, z = a + q(sum_r q(c_r (x_r - a))), a the weights of the last meeting; a lossy one adds what each has
    kept back.
    """

    def begin(self) -> None:
        self.common = clone(self.replicas[0].weights)
        self.shares: list[Sequence[float]] = []
        self.anchor = clone(self.replicas[0].weights)
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()}

    def before_update(self, step: int) -> None:
        pass

    def after_update(self, step: int, counts: Sequence[float]) -> None:
        self.shares.append(counts)
        if (step + 1) % int(self.choice["steps"]):
            return
        totals = [sum(column) / len(self.shares) for column in zip(*self.shares, strict=True)]
        agreed = self._mean(totals)
        if self.choice["outer"] == "nesterov":
            agreed = self._outer_step(agreed)
        for replica in self.replicas:
            replica.weights.update(clone(agreed))
        if self.choice["state"] == "mean":
            self._average_slots(totals)
        self.shares, self.common = [], clone(agreed)

    def _mean(self, totals: Sequence[float]) -> Weights:
        if self.compressed is not None:
            return self._compressed_mean(self.compressed, totals)
        if self.round.is_exact:
            return _weighted_sum([replica.weights for replica in self.replicas], totals)
        mean: Weights = {}
        for name, common in self.common.items():
            moved = [replica.weights[name].detach() - common for replica in self.replicas]
            sent = [self.round(tensor * share) for tensor, share in zip(moved, totals, strict=True)]
            mean[name] = common + self.round(sum(sent[1:], sent[0]))
        return mean

    def _compressed_mean(self, add_up: CompressedSum, totals: Sequence[float]) -> Weights:
        moved = [
            {name: replica.weights[name].detach() - common for name, common in self.common.items()}
            for replica in self.replicas
        ]
        found = {name: total for name, total in add_up(moved, totals).items() if total is not None}
        return {name: common + found[name] for name, common in self.common.items()}

    def _outer_step(self, mean: Weights) -> Weights:
        lr, momentum = float(self.choice["outer_lr"]), float(self.choice["outer_momentum"])
        for name, anchor in self.anchor.items():
            delta = anchor - mean[name]
            self.velocity[name] = momentum * self.velocity[name] + delta
            self.anchor[name] = anchor - lr * (delta + momentum * self.velocity[name])
        return self.anchor

    def _average_slots(self, totals: Sequence[float]) -> None:
        for name in self.anchor:
            mean = _weighted_sum([dict(replica.optimizer.slots[name]) for replica in self.replicas], totals)
            for replica in self.replicas:
                slots = {**replica.optimizer.slots, name: clone(mean)}
                replica.optimizer = replace(replica.optimizer, slots=slots)


@final
class GossipEquations(AbstractEquations):
    """X <- W X - lr G (mixed during the gradient), or X <- W (X - lr G) (after the update).

    With a codec q, x_r + sum_j W[r, j] (q(x_j) - q(x_r)) in the place of sum_j W[r, j] x_j.
    """

    def begin(self) -> None:
        self.matrix = make_mixing(str(self.choice["graph"]), len(self.replicas)).matrix()

    def before_update(self, step: int) -> None:
        if self.choice["mix"] == "during":
            self._mix()

    def after_update(self, step: int, counts: Sequence[float]) -> None:
        if self.choice["mix"] == "after":
            self._mix()

    def _mix(self) -> None:
        before = [clone(replica.weights) for replica in self.replicas]
        if not self.round.is_exact:
            self._mix_rounded([round_all(self.round, weights) for weights in before])
            return
        for replica, row in zip(self.replicas, self.matrix.tolist(), strict=True):
            replica.weights.update(_weighted_sum(before, row))

    def _mix_rounded(self, seen: Sequence[Weights]) -> None:
        for rank, (replica, row) in enumerate(zip(self.replicas, self.matrix.tolist(), strict=True)):
            for name, weights in replica.weights.items():
                total = weights.detach()
                for other, weight in enumerate(row):
                    if weight and other != rank:
                        total = total + (seen[other][name] - seen[rank][name]) * weight
                replica.weights[name] = total


@final
class ElasticEquations(AbstractEquations):
    """On rank r's turn: f = alpha (x_r - c);  x_r <- x_r - f;  c <- c + f. Then its own update.

    With a codec q, f = alpha (q(x_r) - q(c)).
    """

    def begin(self) -> None:
        self.centre = clone(self.replicas[0].weights)

    def before_update(self, step: int) -> None:
        period, alpha = int(self.choice["steps"]), float(self.choice["beta"]) / len(self.replicas)
        for rank in range(step % period, len(self.replicas), period):
            weights = self.replicas[rank].weights
            for name, centre in self.centre.items():
                force = alpha * (self.round(weights[name]) - self.round(centre))
                weights[name] = weights[name] - force
                self.centre[name] = centre + force

    def after_update(self, step: int, counts: Sequence[float]) -> None:
        pass


def _weighted_sum(weights: Sequence[Mapping[str, Tensor]], factors: Sequence[float]) -> Weights:
    """In the order of ranks."""
    total = {name: tensor * factors[0] for name, tensor in weights[0].items()}
    for other, factor in zip(weights[1:], factors[1:], strict=True):
        total = {name: tensor + other[name] * factor for name, tensor in total.items()}
    return total
