"""Gradients that have their weight before samples of several replicas meet."""

import math

import torch
from torch import Tensor, nn

from weft.distributed.placement.weighting import Weighting, scale_gradient, weigh_loss, weigh_outputs
from weft.graph import EagerExecutor
from weft.specs import Batch
from weft.training.gradients import gradients_of
from weft.training.losses import mse


def test_values_stay_and_gradients_are_scaled() -> None:
    x = torch.arange(4.0).requires_grad_()
    outputs = scale_gradient({"a": x * 2, "fixed": torch.ones(1)}, 0.25)
    assert torch.equal(outputs["a"], x.detach() * 2)
    outputs["a"].sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.5] * 4


def test_a_rank_that_does_not_count_sends_back_zeros_whatever_its_gradient() -> None:
    x = torch.ones(1).requires_grad_()
    (scale_gradient(x * 1, 0.0) * math.inf).backward()
    assert x.grad is not None and x.grad.item() == 0.0


def test_a_weighed_loss_is_itself_and_its_gradient_weighs() -> None:
    weighting, predictions = Weighting(), torch.tensor([3.0], requires_grad=True)
    weighting.replica, weighting.piece = 0.5, 0.5
    loss = weigh_loss(mse(), weighting)(predictions, torch.tensor([1.0]))
    loss.backward()
    assert loss.item() == 4.0 and predictions.grad is not None and predictions.grad.item() == 1.0


def test_outputs_of_a_script_weigh_as_much_as_their_batch() -> None:
    model, weighting, weights = nn.Linear(1, 1), Weighting(), [0.25, 0.75]
    before, after = weigh_outputs(weighting, lambda: weights.pop(0))
    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    (model(torch.ones(1, 1)) + model(torch.ones(1, 1))).sum().backward()
    assert model.bias.grad is not None and model.bias.grad.item() == 1.0


def test_micro_batches_of_weighted_samples_add_up_to_the_batch() -> None:
    """Three pieces of two samples, one of them empty: the same gradient as the batch in one piece."""
    x, y = torch.randn(2, 3), torch.randn(2, 1)
    found = []
    for pieces in (1, 3):
        torch.manual_seed(0)
        weighting = Weighting()
        executor = EagerExecutor(nn.Linear(3, 1), weigh_loss(mse(), weighting))
        gradients: dict[str, Tensor | None] = {}
        state, batch = executor.initial_state(), Batch((x,), (y,))
        loss, _ = gradients_of(executor, state, batch, pieces, gradients.__setitem__, weighting)
        found.append((torch.tensor(loss), gradients["weight"]))
    torch.testing.assert_close(found[0], found[1])
