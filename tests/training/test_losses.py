import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from weft.errors import RecipeError, UsageError
from weft.graph import Loss
from weft.specs import IGNORED
from weft.training.component import Component, build
from weft.training.losses import LOSSES


def make(name: str, **options: Any) -> Loss:
    return build(Component(name, **options), LOSSES, "loss")


def test_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])
    expected = (-math.log(3 / 4) - math.log(1 / 2)) / 2
    assert make("cross_entropy")(logits, torch.tensor([1, 0])).item() == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_torch(smoothing: float) -> None:
    logits, labels = torch.randn(6, 9, requires_grad=True), torch.randint(9, (6,))
    loss = make("cross_entropy", label_smoothing=smoothing)(logits, labels)
    assert torch.equal(loss, F.cross_entropy(logits, labels, label_smoothing=smoothing))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_labels_stay_integers(dtype: torch.dtype) -> None:
    # Deep500 cast labels to the type of the output, which helped regression and broke classification.
    logits, labels = torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 2], dtype=dtype)
    expected = F.cross_entropy(logits, labels.long())
    assert torch.equal(make("cross_entropy")(logits, labels), expected)


def test_padding_does_not_weigh() -> None:
    logits, labels = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    labels[1, 1:] = IGNORED
    counted = torch.cat([logits[0], logits[1, :1]]), torch.cat([labels[0], labels[1, :1]])
    expected = F.cross_entropy(*counted)
    torch.testing.assert_close(make("cross_entropy")(logits, labels), expected)
    torch.testing.assert_close(
        make("cross_entropy", label_smoothing=0.2)(logits, labels), F.cross_entropy(*counted, label_smoothing=0.2)
    )


def test_batch_of_padding_alone_has_no_loss_and_no_gradient() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    loss = make("cross_entropy")(logits, torch.full((3,), IGNORED))
    loss.backward()
    assert loss.item() == 0 and logits.grad is not None and not logits.grad.any()


def test_errors_by_hand() -> None:
    predictions, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [3.0, 8.0]])
    assert make("mse")(predictions, targets).item() == 5.0
    assert make("l1")(predictions, targets).item() == 1.5


@pytest.mark.parametrize("name", ["mse", "l1"])
def test_shapes_that_would_broadcast_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"different shapes .*float32 \[4, 1\].*float32 \[4\]"):
        make(name)(torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("labels", [torch.zeros(4), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, 3)])
def test_labels_of_the_wrong_type_or_shape_are_refused(labels: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="one integer label"):
        make("cross_entropy")(torch.zeros(4, 3), labels)


def test_impossible_options_are_refused() -> None:
    with pytest.raises(UsageError, match="label_smoothing is out of range"):
        make("cross_entropy", label_smoothing=1.0)
    with pytest.raises(RecipeError, match="did you mean 'cross_entropy'"):
        make("crossentropy")
