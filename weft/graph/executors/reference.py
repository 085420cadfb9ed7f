"""The reference executor: the same step in float64, which the other executors are checked against."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.graph.executors.eager import EagerExecutor
from weft.graph.executors.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.specs import Batch

__all__ = ["ReferenceExecutor"]


class ReferenceExecutor(AbstractExecutor):
    """Computes in float64 on a copy of the module. Its state, gradients and outputs are float64 too.

    It accepts a state of any floating-point type, so that a float32 state can be stepped exactly.

    Args:
        module: copied; the original stays as it is.
        loss: `loss(predictions, *targets)`, a scalar.
    """

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._eager = EagerExecutor(copy.deepcopy(module).double(), loss)

    def initial_state(self) -> State:
        return self._eager.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        return self._eager(_double_state(state), batch.to(dtype=torch.float64), on_gradient)

    def infer(self, state: State, batch: Batch) -> Outputs:
        return self._eager.infer(_double_state(state), batch.to(dtype=torch.float64))

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._eager.first_bad_tensor(_double_state(state), batch.to(dtype=torch.float64))


def _double_state(state: State) -> State:
    def double(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if all(t.dtype == torch.float64 or not t.is_floating_point() for t in tensors.values()):
            return tensors
        return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}

    return State(double(state.parameters), double(state.buffers), state.random)
