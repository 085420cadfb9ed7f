"""How good predictions are, in a form that sums over batches without bias.

A batch gives a `Tally`; tallies add; the sum has a value. A batch weighs by what it holds, so a short last batch, or
any other way to cut the data, changes nothing:

    tallies = {name: Tally() for name in names}
    for batch in batches:
        tallies[name] = tallies[name] + QUALITY[name](predictions, batch.targets, loss, batch.num_targets)
    values = {name: tally.value for name, tally in tallies.items()}
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.specs import IGNORED

__all__ = [
    "KINDS",
    "QUALITY",
    "QualityMetric",
    "Tally",
    "accuracy",
    "difference_heatmap",
    "l1_error",
    "l2_error",
    "max_error",
    "mean_loss",
    "variance_heatmap",
]

Kind = Literal["empty", "mean", "root mean square", "maximum"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Tally:
    """The contribution of some batches to a metric. `Tally()` is the start of every sum.

    >>> (Tally("mean", 30.0, 10) + Tally("mean", 2.0, 1)).value
    2.909090909090909
    """

    kind: Kind = "empty"
    amount: float = 0.0  # a sum, a sum of squares, or a maximum
    count: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        assert self.kind == other.kind, f"tallies of two metrics do not add ({self.kind}, {other.kind})"
        if self.kind == "maximum":
            # max() of Python loses a not-a-number that comes second.
            amount = math.nan if math.isnan(self.amount + other.amount) else max(self.amount, other.amount)
        else:
            amount = self.amount + other.amount
        return Tally(self.kind, amount, self.count + other.count)

    @property
    def value(self) -> float:
        """The metric over everything tallied; not-a-number when that is nothing."""
        if self.count == 0:
            return math.nan
        if self.kind == "maximum":
            return self.amount
        mean = self.amount / self.count
        return mean if self.kind == "mean" else math.sqrt(mean)


def accuracy(predictions: Tensor, targets: Tensor, k: int = 1) -> Tally:
    """The share of targets that are among the k highest scores.

    A row of scores with a not-a-number is wrong. With fewer than k classes every other row is right.

    Args:
        predictions: scores [..., classes].
        targets: class indices [...], of any integer type; those that are IGNORED (padding) do not count.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).value
    0.5
    """
    if predictions.shape[:-1] != targets.shape or targets.is_floating_point():
        raise UsageError(
            "accuracy needs one class index for each row of scores "
            f"(predictions: {list(predictions.shape)}, targets: {list(targets.shape)} of {targets.dtype})"
            "; check the loss and metrics of the task"
        )
    if k == 1:
        chosen = predictions.argmax(-1, keepdim=True)
    else:
        chosen = predictions.topk(min(k, predictions.shape[-1]), dim=-1).indices
    is_right = (chosen == targets.unsqueeze(-1)).any(-1) & ~predictions.isnan().any(-1)
    return Tally("mean", float(is_right.sum()), int((targets != IGNORED).sum()))


def l1_error(predictions: Tensor, targets: Tensor) -> Tally:
    """The mean absolute difference of an element."""
    difference = _difference(predictions, targets)
    return Tally("mean", float(difference.abs().sum()), difference.numel())


def l2_error(predictions: Tensor, targets: Tensor) -> Tally:
    """The root mean square difference of an element: the Euclidean norm over the root of the number of elements."""
    difference = _difference(predictions, targets)
    return Tally("root mean square", float(difference.square().sum()), difference.numel())


def max_error(predictions: Tensor, targets: Tensor) -> Tally:
    """The largest absolute difference of an element."""
    difference = _difference(predictions, targets)
    return Tally("maximum", float(difference.abs().max()) if difference.numel() else 0.0, difference.numel())


def mean_loss(loss: Tensor | float, num_targets: int) -> Tally:
    """A loss that is the mean over the targets of a batch."""
    return Tally("mean", float(loss) * num_targets, num_targets)


def difference_heatmap(a: Tensor, b: Tensor) -> Tensor:
    """Where two results differ: 2 (a - b) / (|a| + |b|) for each element, between -2 and 2, in float64.

    Equal elements, zeros and infinities among them, give 0; an infinite element against another gives 2 or -2;
    not-a-number stays.

    >>> difference_heatmap(torch.tensor([0.0, 3.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    difference = _difference(a, b)
    a, b = a.double(), b.double()
    relative = 2 * difference / (a.abs() + b.abs())
    relative = torch.where(a.isinf() | b.isinf(), 2 * difference.sign(), relative)
    return torch.where(a == b, torch.zeros_like(relative), relative)


def variance_heatmap(outputs: Sequence[Tensor]) -> Tensor:
    """The sample variance of each element over repeated outputs, in float64: exactly 0 where all are equal.

    >>> variance_heatmap([torch.tensor([1.0, 5.0]), torch.tensor([1.0, 7.0])]).tolist()
    [0.0, 2.0]
    """
    if len(outputs) < 2 or any(output.shape != outputs[0].shape for output in outputs):
        shapes = [list(output.shape) for output in outputs]
        raise UsageError(f"variance needs two or more outputs of one shape (shapes: {shapes}); repeat the call")
    # Differences from the first output: a mean of equal values may be off by a rounding, a mean of zeros is not.
    deviations = torch.stack([output.double() - outputs[0].double() for output in outputs])
    return deviations.var(dim=0, correction=1)


class QualityMetric(Protocol):
    """How a metric is tallied for one batch, from what every executor gives."""

    def __call__(
        self, predictions: Tensor, targets: Tensor | Sequence[Tensor], loss: Tensor | float, num_targets: int
    ) -> Tally: ...


QUALITY: dict[str, QualityMetric] = {
    "loss": lambda predictions, targets, loss, num_targets: mean_loss(loss, num_targets),
    "accuracy": lambda predictions, targets, loss, num_targets: accuracy(predictions, _first(targets)),
    "top5_accuracy": lambda predictions, targets, loss, num_targets: accuracy(predictions, _first(targets), k=5),
    "l1_error": lambda predictions, targets, loss, num_targets: l1_error(predictions, _first(targets)),
    "l2_error": lambda predictions, targets, loss, num_targets: l2_error(predictions, _first(targets)),
    "max_error": lambda predictions, targets, loss, num_targets: max_error(predictions, _first(targets)),
}
"""By the name of the metric. Of several targets the first is the one that predictions are held against."""


def _first(targets: Tensor | Sequence[Tensor]) -> Tensor:
    return targets if isinstance(targets, Tensor) else targets[0]


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b in float64. Shapes must be equal: [n, 1] minus [n] would quietly become [n, n]."""
    if a.shape != b.shape:
        raise UsageError(
            f"predictions and targets differ in shape ({list(a.shape)}, {list(b.shape)}); reshape one of them"
        )
    return a.double() - b.double()
