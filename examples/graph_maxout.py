"""Maxout (Goodfellow et al., 2013), written with the sizes of its input and captured once for any batch.

Each output is the largest of a few linear functions. Run: python examples/graph_maxout.py
"""

from typing import Any

import torch
from torch import Tensor

from weft.graph import Program, capture, rewrite, text_of

NUM_PIECES = 4


def maxout(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch = x.shape[0]
    return (x @ weight + bias).view(batch, -1, NUM_PIECES).amax(2)


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    parameters = {name: tensor.detach().requires_grad_() for name, tensor in state.items()}
    with torch.enable_grad():
        made = maxout(batch["x"], parameters["weight"], parameters["bias"]) @ parameters["out"]
        loss = (made.squeeze(1) - batch["y"]).square().sum() / batch["x"].shape[0]
        gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {"loss": loss}, {name: state[name] - 0.1 * g for name, g in zip(parameters, gradients, strict=True)}


def draw(count: int, generator: torch.Generator) -> dict[str, Tensor]:
    x = 2 * torch.rand(count, 1, generator=generator) - 1
    return {"x": x, "y": x.squeeze(1).square()}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (1, 6 * NUM_PIECES), "bias": (6 * NUM_PIECES,), "out": (6, 1)}
    state = {name: torch.randn(shape, generator=generator) / 2 for name, shape in shapes.items()}

    graph = capture(step, state, draw(8, generator), dynamic="batch")
    print(text_of(graph))
    program = Program(rewrite(graph))
    for i in range(201):
        count = 2 + 7 * i % 60  # a batch of another size at every step, one program
        outputs, state, _ = program(state, draw(count, generator))
        if i % 50 == 0:
            print(f"step {i:3}  batch {count:2}  loss {outputs['loss']:.5f}")


if __name__ == "__main__":
    main()
