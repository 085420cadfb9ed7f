"""Weight stashing: a minibatch goes back through the weights that it came forward with (Narayanan et al., 2019).

stage s of n, own        forward of t with the stage's newest weights: minibatches 0 .. t - n + s have updated them
vertical sync            forward of t with those that stage 0 has then: minibatches 0 .. t - n, on every stage
backward of t            with the weights of its forward, which autograd keeps: a copy that no update writes to
"""

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.func import functional_call

from weft.distributed.placement.pipeline.completion import AbstractCompletion
from weft.distributed.placement.pipeline.put_off import Grow
from weft.graph import GradientSink
from weft.torch_private import shares_memory

__all__ = ["Stash", "StashedModule"]


@final
class Stash(AbstractCompletion):
    """Versions of a stage's weights, counted since the pipeline was last empty, and the gradients that come back to
    them.

    Args:
        parameters: that are trained, by name.
        is_vertical: whether all stages take the version of stage 0.
    """

    def __init__(self, parameters: Mapping[str, Tensor], num_stages: int, stage: int, *, is_vertical: bool) -> None:
        self._parameters = parameters
        self._delay = num_stages - stage - 1
        self._lag = stage if is_vertical else 0
        self._versions: dict[int, dict[str, Tensor]] = {}
        self._sink: GradientSink | None = None
        self._missing: set[str] = set()

    def take(self, minibatch: int) -> Mapping[str, Tensor]:
        """The weights for a forward pass; minibatches come in their order, after the updates of those before."""
        newest = max(0, minibatch - self._delay)
        if newest not in self._versions:
            self._versions[newest] = {name: self._copy(name, p) for name, p in self._parameters.items()}
        wanted = max(0, minibatch - self._delay - self._lag)
        self._versions = {number: found for number, found in self._versions.items() if number >= wanted}
        return self._versions[wanted]

    def begin(self, sink: GradientSink) -> None:
        """A backward pass follows, whose gradients go to the sink."""
        self._sink, self._missing = sink, set(self._parameters)

    def begin_last(self, chunk: int) -> None:
        """Every pass is the last of its minibatch."""

    def end_last(self, chunk: int) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None, "begin() comes first"
        for name in self._parameters:
            if name in self._missing:
                sink(name, None)

    def grow(self, name: str, grow: Grow) -> None:
        raise AssertionError("backward passes of PipeDream are whole")

    def clear(self) -> None:
        """The pipeline is empty: the next minibatch is number 0 again."""
        self._versions.clear()

    def _copy(self, name: str, parameter: Tensor) -> Tensor:
        copied = parameter.detach().clone().requires_grad_()
        copied.register_post_accumulate_grad_hook(self._hand_over(name))
        return copied

    def _hand_over(self, name: str) -> Callable[[Tensor], None]:
        def hook(copied: Tensor) -> None:
            gradient, copied.grad = copied.grad, None
            # Views on the way back make autograd hand one piece of memory to two parameters, or keep it for itself.
            if gradient is not None and shares_memory(gradient):
                gradient = gradient.clone()
            assert self._sink is not None, "begin() comes first"
            self._missing.discard(name)
            self._sink(name, gradient)

        return hook


@final
class StashedModule(nn.Module):
    """A stage that computes with the weights of a stash, in the place of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inner = [module]  # in a list: its parameters are not this module's
        self.weights: Mapping[str, Tensor] = {}

    def forward(self, *values: Any) -> Any:
        return functional_call(self._inner[0], dict(self.weights), values)
