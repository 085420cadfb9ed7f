"""Steps to capture, each with its state and batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.graph import Graph, capture, training_step

__all__ = ["descent", "descent_inputs", "graph_of", "plain"]


def plain(module: nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """A module's tensors as the state of a step."""
    return {
        "parameters": {name: tensor.detach() for name, tensor in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }


def graph_of(module: nn.Module, *inputs: Tensor, targets: Tensor) -> Graph:
    """Forward, loss and gradients of a module."""
    step = training_step(module, nn.functional.mse_loss)
    return capture(step, plain(module), {"inputs": inputs, "targets": (targets,)})


def descent(state: Any, batch: Any) -> tuple[Any, Any]:
    """One step of gradient descent on |w x + b - y|^2, written out: forward, backward and update."""
    w, b = (state[name].detach().requires_grad_() for name in ("w", "b"))
    with torch.enable_grad():
        loss = (batch["x"] @ w + b - batch["y"]).square().mean()
        gradients = torch.autograd.grad(loss, (w, b))
    new = {"w": state["w"] - 0.1 * gradients[0], "b": state["b"] - 0.1 * gradients[1], "step": state["step"] + 1}
    return {"loss": loss.detach()}, new


def descent_inputs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    state = {"w": torch.randn(3, 2), "b": torch.zeros(2), "step": torch.tensor(0)}
    return state, {"x": torch.randn(5, 3), "y": torch.randn(5, 2)}
