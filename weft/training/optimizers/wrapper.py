"""An optimizer around another: it is asked as that one is, and does something more, or less, in an update."""

from collections.abc import Mapping

from torch import Tensor

from weft.training.optimizers.optimizer import AbstractOptimizer, OptimizerState, Scope

__all__ = ["AbstractOptimizerWrapper"]


class AbstractOptimizerWrapper(AbstractOptimizer):
    """Leaves `update` to say."""

    def __init__(self, inner: AbstractOptimizer) -> None:
        self._inner = inner

    @property
    def lr(self) -> float:
        return self._inner.lr

    @property
    def scope(self) -> Scope:
        return self._inner.scope

    def init(self, parameters: Mapping[str, Tensor]) -> OptimizerState:
        return self._inner.init(parameters)

    def prepare(self, parameters: Mapping[str, Tensor], state: OptimizerState) -> Mapping[str, Tensor]:
        return self._inner.prepare(parameters, state)
