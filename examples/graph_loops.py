"""Two loops that are one operator each, with gradients: a recurrent network, and Newton's inverse of a matrix.

    h[t+1] = tanh(h[t] W + x[t] U)              carried: h; input: x[t]; output: h[t+1]
    X[k+1] = X[k] (2 - A X[k])                  carried: X; A is read from outside

Backward keeps a few states and computes the others again; the picture shows which. Run: python examples/graph_loops.py
"""

from typing import Any

import torch
from torch import Tensor

from weft.graph import Program, capture, draw_schedule, loop, rewrite, text_of
from weft.metrics.memory import use_tensor_memory_peak


def rnn(state: Any, x: Tensor, checkpoints: int | None = None) -> Tensor:
    """States of a recurrent network after each of the times of `x`, which has shape [time, batch, features]."""

    def body(_counter: Tensor, h: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ state["W"] + now @ state["U"])
        return h, h

    begin = x.new_zeros(x.shape[1], state["W"].shape[0])
    _, states = loop(body, begin, x, checkpoints=checkpoints)
    assert isinstance(states, Tensor)
    return states


def inverse(a: Tensor, num_iterations: int) -> Tensor:
    """Newton's iteration, from a start that converges for every matrix (Pan and Reif, 1985)."""

    def body(_counter: Tensor, x: Tensor, _inputs: Any) -> tuple[Tensor, Any]:
        return x @ (2 * torch.eye(a.shape[0]) - a @ x), ()

    begin = a.t() / (torch.linalg.matrix_norm(a, 1) * torch.linalg.matrix_norm(a, torch.inf))
    found, _ = loop(body, begin, num_iterations=num_iterations)
    assert isinstance(found, Tensor)
    return found


def step(state: Any, batch: Tensor) -> tuple[Any, Any]:
    """Let the last state of the network tell the sum of what it has seen."""
    weights = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    with torch.enable_grad():
        told = rnn(weights, batch)[-1] @ weights["out"]
        loss = (told.squeeze(1) - batch.sum((0, 2))).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
    return {"loss": loss}, {name: state[name] - 0.02 * g for name, g in zip(state, gradients, strict=True)}


def main() -> None:
    torch.manual_seed(0)
    state = {"W": torch.eye(8) / 2, "U": torch.randn(1, 8) / 2, "out": torch.randn(8, 1) / 2}
    graph = capture(step, state, torch.randn(6, 4, 1), dynamic={"batch": {0: "time", 1: "batch"}})
    print(text_of(graph))
    program = Program(rewrite(graph))
    for i in range(301):
        outputs, state, _ = program(state, torch.randn(3 + i % 5, 32, 1) / 2)  # sequences of any length
        if i % 100 == 0:
            print(f"step {i:3}  loss {outputs['loss']:.4f}")

    a = torch.eye(5) + torch.randn(5, 5) / 5
    a.requires_grad_()
    found = inverse(a, 20)
    (gradient,) = torch.autograd.grad(found.sum(), a)
    ones = torch.ones(5, 5)
    expected = -(torch.linalg.inv(a).t() @ ones @ torch.linalg.inv(a).t())  # of the sum of the inverse
    error, slope_error = ((x - y).abs().max().item() for x, y in ((found, torch.linalg.inv(a)), (gradient, expected)))
    print(f"inverse: error {error:.1e}, error of its gradient {slope_error:.1e}")

    print(draw_schedule(12, 2))
    x = torch.randn(400, 16, 64)
    for checkpoints in (399, None, 4):
        weights = {name: torch.randn(64, 64).div(10).requires_grad_() for name in ("W", "U")}
        with use_tensor_memory_peak() as peak:
            loss = rnn(weights, x, checkpoints)[-1].sum()
        loss.backward()
        name = "checkpoints by default" if checkpoints is None else f"{checkpoints} checkpoints"
        print(f"{name}: {peak.num_bytes / 1e6:.1f} MB held for backward, with what the loop is given and gives")


if __name__ == "__main__":
    main()
