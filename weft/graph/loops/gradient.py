"""One iteration of a loop, and its gradient, as programs."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.graph.capture.capture import capture_noting
from weft.graph.capture.dynamic_sizes import example_of, names_of
from weft.graph.capture.recorder import lifted
from weft.graph.capture.tracing import Origin
from weft.graph.formats.loop_bodies import find_body
from weft.graph.ir.graph import Graph
from weft.graph.ir.interpreter import replay
from weft.graph.programs.generated_program import Program
from weft.graph.rewrites import rewrite

__all__ = ["backward_program", "forward_program", "is_differentiable"]


def is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@cache
def forward_program(key: str) -> Program:
    return _in_a_new_thread(lambda: Program(rewrite(find_body(key))))


@cache
def backward_program(key: str) -> Program:
    """Takes what the iteration takes, then a gradient for each differentiable result; gives a gradient for each
    differentiable thing that it takes, None where no result depends on it."""
    return _in_a_new_thread(lambda: Program(rewrite(_backward_of(find_body(key)))))


def _in_a_new_thread(make: Callable[[], Program]) -> Program:
    """Programs are made when a kernel first needs them. A kernel runs with autograd shut out, and perhaps with modes at
    work; a new thread knows nothing of either."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(make).result()


def _backward_of(body: Graph) -> Graph:
    origin = Origin()
    results = [node.meta["val"] for node in body.result_nodes]
    fakes = {
        "taken": [node.meta["val"] for node in body.placeholders],
        "gradients": [value for value in results if is_differentiable(value)],
    }

    def step(_state: Any, batch: Any) -> tuple[Any, Any]:
        taken = [tensor.detach().requires_grad_(is_differentiable(tensor)) for tensor in batch["taken"]]
        with torch.enable_grad():
            values = replay(body.nodes, taken, lifted(body.constants), before=origin.follow)
            origin.follow(None)
            made = [value for value in values[body.nodes.output_node()] if is_differentiable(value)]
            pairs = [(m, g) for m, g in zip(made, batch["gradients"], strict=True) if m.requires_grad]
            wanted = [tensor for tensor in taken if tensor.requires_grad]
            if not pairs:
                return [None] * len(wanted), ()
            found = torch.autograd.grad([m for m, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        return list(found), ()

    batch = {part: [example_of(fake) for fake in group] for part, group in fakes.items()}
    dynamic = {
        f"batch.{part}.{i}": names
        for part, group in fakes.items()
        for i, fake in enumerate(group)
        if (names := names_of(fake))
    }
    return capture_noting(step, (), batch, origin.note, dynamic or None)
