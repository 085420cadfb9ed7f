"""Losses: `loss(predictions, *targets)`, a scalar, the mean over all the targets of a batch that count.

Padding does not weigh. A batch of sequences in which some targets are `IGNORED` has the mean over the others, whichever
sequence they stand in; a batch in which none counts has loss and gradient 0.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from weft.errors import UsageError
from weft.graph import Loss
from weft.specs import IGNORED

__all__ = ["LOSSES"]


def cross_entropy(*, label_smoothing: float = 0.0) -> Loss:
    """Logits [..., classes] against integer labels [...], in nats.

    >>> import torch
    >>> round(cross_entropy()(torch.zeros(2, 10), torch.tensor([3, 7])).item(), 4)  # ln 10
    2.3026
    """
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing is out of range ({label_smoothing}); give 0 <= label_smoothing < 1")

    def loss(predictions: Tensor, labels: Tensor) -> Tensor:
        if labels.is_floating_point() or predictions.shape[:-1] != labels.shape:
            raise UsageError(
                "cross-entropy takes one integer label for each row of logits "
                f"(logits: {_describe(predictions)}, labels: {_describe(labels)}); choose loss mse for real targets"
            )
        flat = labels.flatten().long()
        total = F.cross_entropy(
            predictions.flatten(0, -2), flat, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
        )
        return total / (flat != IGNORED).sum().clamp(min=1)

    return loss


def mse() -> Loss:
    """Squared error, the mean over all elements of predictions and targets of the same shape."""

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        _check_same_shape(predictions, targets)
        return F.mse_loss(predictions, targets)

    return loss


def l1() -> Loss:
    """Absolute error, the mean over all elements of predictions and targets of the same shape."""

    def loss(predictions: Tensor, targets: Tensor) -> Tensor:
        _check_same_shape(predictions, targets)
        return F.l1_loss(predictions, targets)

    return loss


def _check_same_shape(predictions: Tensor, targets: Tensor) -> None:
    # Broadcasting [batch, 1] against [batch] would compare every prediction with every target.
    if predictions.shape != targets.shape:
        raise UsageError(
            "predictions and targets have different shapes "
            f"(predictions: {_describe(predictions)}, targets: {_describe(targets)}); check the model's outputs"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


LOSSES: Mapping[str, Callable[..., Loss]] = {"cross_entropy": cross_entropy, "l1": l1, "mse": mse}
