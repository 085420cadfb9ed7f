"""How each system makes a step: forward, loss, backward, SGD with momentum. Each gives an endless iterator of losses.

A system with `memory kept` has the C library keep freed memory, as `weft run` does; the other peers are as they come.
"""

from collections.abc import Callable, Iterator
from importlib import import_module

import torch
from torch import Tensor, nn

from benchmarks.graph_steps.cases import LR, MOMENTUM, Case, loss_of
from weft.graph import GraphExecutor
from weft.specs import Batch
from weft.training.optimizers import Momentum, Optimizer
from weft.training.process import keep_freed_memory
from weft.training.whole_step import step_in_one

__all__ = ["SYSTEMS", "System"]

System = Callable[[Case], Iterator[float]]


def eager(case: Case) -> Iterator[float]:
    return plain_loop(case, lambda model: model)


def compiled(case: Case) -> Iterator[float]:
    """torch.compile as its tutorial has it: the model, and a plain optimizer."""
    torch.compiler.reset()
    return plain_loop(case, torch.compile)


def graph(case: Case) -> Iterator[float]:
    return weft_loop(case, fused=False)


def inductor(case: Case) -> Iterator[float]:
    return weft_loop(case, fused=True)


def jax(case: Case) -> Iterator[float]:
    steps: Iterator[float] = import_module("benchmarks.graph_steps.jax_models").steps(case)
    return steps


def keeping(system: System) -> System:
    def kept(case: Case) -> Iterator[float]:
        assert keep_freed_memory()
        return system(case)

    return kept


SYSTEMS: dict[str, System] = {
    "eager": eager,
    "eager, memory kept": keeping(eager),
    "torch.compile": compiled,
    "torch.compile, memory kept": keeping(compiled),
    "jax": jax,
    "graph": keeping(graph),
    "inductor": keeping(inductor),
}


def plain_loop(case: Case, wrap: Callable[[nn.Module], Callable[..., Tensor]]) -> Iterator[float]:
    """The loop of a user's script."""
    model = case.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    run = wrap(model)
    for x, y in case.batches():
        optimizer.zero_grad()
        loss = loss_of(run(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


def weft_loop(case: Case, *, fused: bool) -> Iterator[float]:
    executor = GraphExecutor(case.make_model(), loss_of, fused=fused)
    optimizer, model = Optimizer(Momentum(MOMENTUM), lr=LR), executor.initial_state()
    state = optimizer.init(model.parameters)
    step = step_in_one(executor, optimizer, model, clip_norm=None)
    assert step is not None
    for x, y in case.batches():
        loss, model, state = step(model, state, Batch((x,), (y,)), LR)
        yield loss
