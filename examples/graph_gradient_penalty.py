"""The critic of a Wasserstein GAN with gradient penalty, as a graph that is extended step by step.

The penalty (Gulrajani et al., 2017, equation 3) holds the slope of the critic near 1 between real and made samples:

    loss = mean f(made) - mean f(real) + 10 mean (|grad_x f(mixed)| - 1)^2

so its gradient by the weights is a gradient of a gradient. Run: python examples/graph_gradient_penalty.py
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.graph import Program, capture, extend, grad, rewrite, update_state

WEIGHTS = ["state.inner", "state.outer"]


def critic(state: Any, x: Tensor) -> Tensor:
    score: Tensor = torch.tanh(x @ state["inner"]) @ state["outer"]
    return score.squeeze(1)


def forward(state: Any, batch: Any) -> tuple[Any, Any]:
    distance = critic(state, batch["made"]).mean() - critic(state, batch["real"]).mean()
    return {"distance": distance, "score": critic(state, batch["mixed"]).sum()}, state


def penalised(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    slopes = values["outputs.gradients.batch.mixed"]
    penalty = (torch.linalg.vector_norm(slopes, dim=1) - 1).square().mean()
    return {"loss": values["outputs.distance"] + 10 * penalty, "penalty": penalty}


def descended(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {f"new.{name}": values[name] - 0.003 * values[f"outputs.gradients.{name}"] for name in WEIGHTS}


def draw(generator: torch.Generator) -> dict[str, Tensor]:
    angle = 6.2832 * torch.rand(64, generator=generator)
    real = torch.stack([angle.cos(), angle.sin()], dim=1)
    made = 0.3 * torch.randn(64, 2, generator=generator)
    share = torch.rand(64, 1, generator=generator)
    return {"real": real, "made": made, "mixed": share * real + (1 - share) * made}


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {"inner": torch.randn(2, 32, generator=generator), "outer": torch.randn(32, 1, generator=generator) / 6}

    graph = capture(forward, state, draw(generator))
    graph = grad(graph, "outputs.score", ["batch.mixed"])
    graph = extend(graph, penalised)
    graph = grad(graph, "outputs.loss", WEIGHTS)
    graph = extend(graph, descended)
    graph = update_state(graph, {name: f"outputs.new.{name}" for name in WEIGHTS})

    short = rewrite(graph)
    print(f"{len(graph.operators)} operators, {len(short.operators)} after exact rewrites")
    program = Program(short)
    for step in range(201):
        outputs, state, _ = program(state, draw(generator))
        if step % 50 == 0:
            print(f"step {step:3}  loss {outputs['loss']:8.4f}  penalty {outputs['penalty']:.4f}")


if __name__ == "__main__":
    main()
