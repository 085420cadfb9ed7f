"""Loops of users for tests of weave, and how far two results are apart."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from weft.distributed.script.weaving.weave import weave

__all__ = ["Change", "apart", "data_of", "make_model", "train"]

Change = Callable[[nn.Module, torch.optim.Optimizer], None]
"""Between backward and step."""


def make_model(width: int = 8) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))


def data_of(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Of two groups with settings of their own."""
    weights, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def train(
    num_samples: int = 22,
    epochs: int = 2,
    accumulate: int = 1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
    change: Change = lambda _model, _optimizer: None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
    after_epoch: Change = lambda _model, _optimizer: None,
    **options: Any,
) -> list[float]:
    """Batches of 8 with a ragged last one, and a schedule; the weights in the end."""
    model = make_model()
    own = optimizer(model)
    model, own, loader = weave(model, own, DataLoader(data_of(num_samples), 8), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(own, 10)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            (loss_of(model(x), y) / accumulate).backward()
            if (number + 1) % accumulate == 0:
                change(model, own)
                own.step()
                own.zero_grad()
                schedule.step()
        after_epoch(model, own)
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def apart(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
