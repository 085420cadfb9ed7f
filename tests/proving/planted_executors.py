"""Executors with a fault each, for proofs to find; named in recipes by their path."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.graph import (
    AbstractExecutor,
    EagerExecutor,
    GradientSink,
    Graph,
    GraphExecutor,
    Loss,
    Outputs,
    State,
    TapeProgram,
)
from weft.specs import Batch

aten = torch.ops.aten


def one_operator(module: nn.Module, loss: Loss) -> AbstractExecutor:
    """The gradient of the second relu leaks."""
    return _edited(module, loss, _leak)


def _leak(graph: Graph) -> None:
    node = [n for n in graph.nodes.nodes if n.target is aten.threshold_backward.default][0]  # noqa: RUF015
    node.args = (*node.args[:2], -1.0)


def _edited(module: nn.Module, loss: Loss, edit: Callable[[Graph], None]) -> AbstractExecutor:
    def make_program(graph: Graph, sunk: str) -> TapeProgram:
        changed = graph.edited()
        edit(changed)
        return TapeProgram(changed, sunk=sunk)

    return GraphExecutor(module, loss, make_program=make_program)


@final
class _Wrapped(AbstractExecutor):
    """The eager executor with its gradients or its state changed."""

    def __init__(self, module: nn.Module, loss: Loss, change: Callable[[str, Any], Any] | None, stale: bool) -> None:
        self._inner = EagerExecutor(module, loss)
        self._change, self._stale = change, stale
        self._first: State | None = None

    def initial_state(self) -> State:
        return self._inner.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        def sink(name: str, gradient: Tensor | None) -> None:
            on_gradient(name, gradient if self._change is None else self._change(name, gradient))

        return self._inner(self._kept(state), batch, sink)

    def _kept(self, state: State) -> State:
        if not self._stale:
            return state
        if self._first is None:
            self._first = replace(state, parameters={name: p.detach().clone() for name, p in state.parameters.items()})
        return self._first

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._inner.infer(state, batch)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._inner.first_bad_tensor(state, batch)


def scaled_gradient(module: nn.Module, loss: Loss) -> AbstractExecutor:
    """No operator is wrong, what is done with a gradient is. Adam takes the same first step for it."""
    return _Wrapped(module, loss, lambda name, g: g.mul_(1.01) if name.endswith("bias") else g, stale=False)


def lost_gradient(module: nn.Module, loss: Loss) -> AbstractExecutor:
    return _Wrapped(module, loss, lambda name, g: None if name.endswith("bias") else g, stale=False)


def stale_parameters(module: nn.Module, loss: Loss) -> AbstractExecutor:
    """Computes every step from the parameters of the first."""
    return _Wrapped(module, loss, None, stale=True)
