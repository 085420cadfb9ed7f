"""Layers and losses that are split by the vocabulary: no rank holds, or sees, all words.

embedding         rank 0: words 0..v/2    rank 1: the others     a word that is not here gives zeros; then a sum
logits            x W_r                                          gathered, or left in parts for the loss
cross entropy     max, then sum of exp and the target's logit    two small all-reduces in place of a gather
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.tensor.collectives import add_up, span_of

__all__ = ["cross_entropy_of_parts", "embed_parts"]


def embed_parts(
    words: Tensor, weight: Tensor, group: AbstractGroup, num_words: int, padding_idx: int | None = None
) -> Tensor:
    """[...] -> [..., width], whole on every rank.

    Args:
        weight: this rank's words, [num_words / n, width].
        padding_idx: the word whose vector gets no gradient.
    """
    begin, own = span_of(num_words, group.rank, group.size)
    is_away = (words < begin) | (words >= begin + own)
    here = (words - begin).masked_fill(is_away, 0)
    has_padding = padding_idx is not None and begin <= padding_idx < begin + own
    found = F.embedding(here, weight, padding_idx - begin if padding_idx is not None and has_padding else None)
    return add_up(found.masked_fill(is_away.unsqueeze(-1), 0.0), group)


def cross_entropy_of_parts(
    logits: Tensor,
    labels: Tensor,
    group: AbstractGroup,
    num_words: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """As torch's cross_entropy, of logits [n, words / ranks] that every rank has its part of.

    Args:
        num_words: of all ranks.
        labels: [n], the same on all ranks, as is what is returned.
        reduction: "mean" over the labels that count, "sum", or "none".
    """
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, group, num_words, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses
    return losses.sum() / (labels != ignore_index).sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: AbstractGroup, num_words: int, ignored: int, smoothing: float
    ) -> Tensor:
        begin, own = span_of(num_words, group.rank, group.size)
        largest = logits.max(-1).values if own else logits.new_full(labels.shape, -torch.inf)
        group.all_reduce(largest, "max")
        shifted = logits - largest.unsqueeze(-1)
        counts = labels != ignored
        is_here = counts & (labels >= begin) & (labels < begin + own)
        at = (labels - begin).masked_fill(~is_here, 0).unsqueeze(-1)
        exponents = shifted.exp()
        target = shifted.gather(-1, at).squeeze(-1).masked_fill(~is_here, 0.0)
        sums = torch.stack([exponents.sum(-1), target, shifted.sum(-1)][: 3 if smoothing else 2])
        group.all_reduce(sums)
        log_total = sums[0].log()
        losses = (1 - smoothing) * (log_total - sums[1])
        if smoothing:
            losses = losses + smoothing * (log_total - sums[2] / num_words)
        ctx.save_for_backward(exponents.div_(sums[0].unsqueeze(-1)), at, is_here, counts)
        ctx.smoothing, ctx.num_words = smoothing, num_words
        return losses.masked_fill(~counts, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        shares, at, is_here, counts = ctx.saved_tensors
        inner = shares - ctx.smoothing / ctx.num_words if ctx.smoothing else shares.clone()
        inner.scatter_add_(-1, at, is_here.unsqueeze(-1).to(inner.dtype).mul_(ctx.smoothing - 1.0))
        weight = (gradient * counts).unsqueeze(-1)
        return inner.mul_(weight), None, None, None, None, None
