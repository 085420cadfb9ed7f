"""Gradients that wait for a shard's turn: each counts with its own share."""

import pytest
import torch

from weft.distributed.consistency.server.steps import PendingGradients

GRADIENTS = [torch.tensor([4.0, 8.0]), torch.tensor([1.0, -1.0]), torch.tensor([2.0, 0.5])]


@pytest.mark.parametrize("shares", [[0.25, 0.25, 0.25], [0.5, 0.25, 0.125], [0.25, 0.25, 0.0]])
def test_the_sum_counts_as_its_parts_would(shares: list[float]) -> None:
    pending = PendingGradients()
    for share, gradient in zip(shares, GRADIENTS, strict=True):
        pending.add(share, [gradient if share else None, None])
    share, (total, absent) = pending.take()
    assert total is not None and absent is None
    parts = [share * gradient for share, gradient in zip(shares, GRADIENTS, strict=True)]
    torch.testing.assert_close(share * total, torch.stack(parts).sum(0))


def test_a_last_step_without_samples_loses_nothing() -> None:
    """Once, the share of the last step was that of all."""
    pending = PendingGradients()
    pending.add(0.25, [GRADIENTS[0]])
    pending.add(0.0, [None])
    share, (total,) = pending.take()
    assert total is not None and torch.equal(share * total, 0.25 * GRADIENTS[0])


def test_what_is_held_does_not_change_with_the_gradient() -> None:
    pending, gradient = PendingGradients(), torch.ones(2)
    pending.add(0.5, [gradient])
    gradient.zero_()
    pending.add(0.5, [torch.ones(2)])
    assert torch.equal(pending.take()[1][0], torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_steps_without_samples_push_nothing() -> None:
    pending = PendingGradients()
    pending.add(0.0, [None, None])
    assert pending.take() == (0.0, [None, None])
