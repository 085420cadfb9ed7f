"""One shard: its pieces of the parameters, their optimizer state, and the updates made of what workers push.

A gradient is the mean over the pusher's own samples, and counts by their share of the batch. How:

    together      the weighted sum of a round, in the order of ranks, is one update with the learning rate as it is:
                  what synchronous ranks do
    share         one gradient is one update, with the learning rate times its share: N updates with the N-th part
                  move plain SGD as far as one synchronous update does
    staleness     one gradient is one update, with the learning rate over its staleness, which is about N with N
                  workers (Zhang, Gupta, Lian and Liu, 2016)
    full          one gradient is one update, with the whole learning rate (Dean et al., 2012)

Momentum stays with the shard, as in Project Adam: there is one velocity, to which every worker adds. Asynchrony acts
like further momentum, of about 1 - 1/N (Mitliagkas, Zhang, Hadjis and Re, 2016): lower the optimizer's own as workers
grow.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, Piece, bucket_pieces
from weft.distributed.consistency.elastic import draw_centre
from weft.specs.axes import Sends
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import AbstractOptimizer, OptimizerState

__all__ = ["Contribution", "Rate", "Shard", "weighted_sum"]

Rate = Literal["together", "share", "staleness", "full"]


@dataclass(frozen=True, eq=False)
class Contribution:
    """A push of one worker for one step, or of a host server for several; None for a piece that had no part in a loss.

    Of what a host server joined, `rank` and `step` are those of the first, `version` is the oldest.
    """

    rank: int
    step: int
    version: int  # of the weights that it was computed on
    weight: float  # its share of the batch
    lr: float
    tensors: tuple[Tensor | None, ...]
    others: tuple[int, ...] = ()  # the versions of those that were joined with the oldest
    loss: float | None = None  # this rank's part of that of the batch, where ranks are synchronous
    host: int | None = None  # the host server that joined it
    settings: str | None = None  # of the rank's optimizer, which the shard's stands for


@final
class Shard:
    """A state machine without transport: `commit` updates, `weights` are what a pull returns.

    Args:
        weights: the pieces, which are updated in place.
        alpha: of the elastic force between the centre and a rank.
        num_workers: how many contributions make a whole round.
        codec: through which ranks see the weights.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        optimizer: AbstractOptimizer,
        *,
        rate: Rate,
        num_workers: int,
        form: Sends = "gradient",
        alpha: float = 0.0,
        clip_norm: float | None = None,
        codec: AbstractCodec | None = None,
    ) -> None:
        self._pieces = {str(index): tensor.detach() for index, tensor in enumerate(weights)}
        self._codec = codec or ExactCodec()
        self.buckets = bucket_pieces([Piece(name, 0, p.numel()) for name, p in self._pieces.items()], self._pieces)
        self._optimizer = optimizer
        self._rate = rate
        self._form = form
        self._alpha = alpha
        self._num_workers = num_workers
        self._clip_norm = clip_norm
        self.state: OptimizerState = optimizer.init(self._pieces)
        self.version = 0
        self.staleness: Counter[int] = Counter()

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self._pieces.values())

    def accepts(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether a worker's tensors are of the pieces' number, shapes and types."""
        pairs = zip(tensors, self.weights, strict=False)
        return len(tensors) == len(self._pieces) and all(
            tensor is None or (tensor.shape == piece.shape and tensor.dtype == piece.dtype) for tensor, piece in pairs
        )

    def move_to(self, places: Sequence[Tensor]) -> None:
        """Go on in other memory: whoever reads the weights where they are may go on doing so."""
        for place, (name, tensor) in zip(places, self._pieces.items(), strict=True):
            self._pieces[name] = place.copy_(tensor)

    def restore(self, weights: Sequence[Tensor], state: OptimizerState, version: int) -> None:
        """Go on from a snapshot."""
        for piece, tensor in zip(self.weights, weights, strict=True):
            piece.copy_(tensor)
        self.state, self.version = state, version

    def commit(self, contributions: Sequence[Contribution], clip_factor: Tensor | None = None) -> float | None:
        """One update. Of gradients that arrive singly there is one contribution.

        Synchronous ranks tell their losses: no update is made if their sum, which is returned, is not finite.

        Args:
            clip_factor: by which the sum is scaled, where all shards clip together.
        """
        for contribution in contributions:
            self.staleness.update(self.version - version for version in (contribution.version, *contribution.others))
        total, factor = self._combine(contributions)
        if clip_factor is not None:
            total = [None if tensor is None else tensor * clip_factor for tensor in total]
        losses = [contribution.loss for contribution in contributions if contribution.loss is not None]
        loss = sum(losses[1:], losses[0]) if losses else None
        has_effect = any(tensor is not None for tensor in total)
        # A synchronous step counts for the optimizer also where this shard's tensors had no part in it.
        if has_effect if loss is None else math.isfinite(loss):
            self._update(dict(zip(self._pieces, total, strict=True)), factor, contributions[0].lr)
        self.version += 1
        return loss

    def norms(self, contributions: Sequence[Contribution]) -> list[Tensor | None]:
        """Of the sum of a round, by piece."""
        total, _ = self._combine(contributions)
        return [None if tensor is None else torch.linalg.vector_norm(tensor) for tensor in total]

    def _combine(self, contributions: Sequence[Contribution]) -> tuple[Sequence[Tensor | None], float]:
        """The gradients of an update, and the factor of its learning rate (or of the difference itself)."""
        first = contributions[0]
        if self._rate == "together":
            return self._add(contributions), 1.0
        assert len(contributions) == 1, "updates by arrival are made of one gradient each"
        match self._rate:
            case "share":
                return first.tensors, first.weight
            case "staleness":
                return first.tensors, 1.0 / max(1, self.version - first.version)
            case "full":
                return first.tensors, 1.0

    def _add(self, contributions: Sequence[Contribution]) -> list[Tensor | None]:
        """The weighted sum. A gradient that only some have counts as zeros of the others, as it does among synchronous
        ranks; where some are missing, the weights of the rest are made to sum to 1."""
        shares = [contribution.weight for contribution in contributions]
        if len(contributions) < self._num_workers:
            whole = sum(shares)
            shares = [share / whole if whole else 0.0 for share in shares]
        if not any(shares):
            return [None] * len(self._pieces)
        return weighted_sum([contribution.tensors for contribution in contributions], shares)

    @torch.no_grad()
    def _update(self, total: Mapping[str, Tensor | None], factor: float, lr: float) -> None:
        if self._form != "gradient":
            for name, pushed in total.items():
                if pushed is not None:
                    self._move(name, pushed, factor)
            return
        if self._clip_norm is not None:
            total = clip_by_norm(total, self._clip_norm)
        self.state = self._optimizer.update(total, self._pieces, self.state, factor * lr)

    def _seen(self, index: int) -> Tensor | None:
        """A piece as ranks are sent it, where that is not as it is."""
        bucket, piece = self.buckets[index], self.weights[index]
        return None if self._codec.is_exact else self._codec.decode(bucket, self._codec.encode(bucket, piece))

    def _move(self, name: str, pushed: Tensor, factor: float) -> None:
        piece = self._pieces[name]
        if self._form == "weights":
            draw_centre(piece, pushed, self._alpha, seen=self._seen(int(name)))
        else:
            piece.add_(pushed, alpha=factor)


def weighted_sum(gradients: Sequence[Sequence[Tensor | None]], shares: Sequence[float]) -> list[Tensor | None]:
    """Of gradients, piece by piece, in the order in which they are given.

    A piece that only some have counts as zeros of the others, as among synchronous ranks; one that none has stays None.

    >>> weighted_sum([[torch.tensor([1.0]), None], [torch.tensor([3.0]), None]], [0.5, 0.5])
    [tensor([2.]), None]
    """
    total: list[Tensor | None] = []
    for found in zip(*gradients, strict=True):
        like = next((tensor for tensor in found if tensor is not None), None)
        if like is None:
            total.append(None)
            continue
        terms = [torch.zeros_like(like) if t is None else t * s for t, s in zip(found, shares, strict=True)]
        for term in terms[1:]:
            terms[0].add_(term)
        total.append(terms[0])
    return total
