"""A script's loop over a model whose parameters lie in pieces (shard_level 2 and 3).

    loss = criterion(model(x), y)    before forward: pieces are gathered, block by block
    loss.backward()                  gradients of a block are added up as it is done with; afterwards parameters are
                                     pieces again, and `grad` is that of the piece
    clip_grad_norm_(...)             by the norm of all pieces
    optimizer.step()                 updates pieces: what it knows are the parameters, which are pieces now
    optimizer.zero_grad()            at any time but in backward

Without gradients (torch.no_grad) parameters are pieces again when forward ends.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.distributed.placement.exchange import GradientExchange
from weft.distributed.placement.gathering import GatheredBlocks
from weft.distributed.script.weaving.gradients import Backward
from weft.distributed.script.weaving.own_hooks import OwnHook
from weft.distributed.script.weaving.weaving import Weaving
from weft.torch_private import shares_memory

__all__ = ["PieceGradients"]


@final
class PieceGradients:
    """Gathers parameters for the forward of one model, and averages gradients during its backward; kept alive by the
    hooks themselves.

    Args:
        exchange: of the model's gradients, of which this rank gets pieces.
        waiting: entered while this rank waits for the others.
    """

    def __init__(
        self,
        weaving: Weaving,
        blocks: GatheredBlocks,
        exchange: GradientExchange,
        backward: Backward,
        waiting: AbstractContextManager[None],
    ) -> None:
        self.index = 0
        self.is_owed = False  # never: pieces of every backward are added up
        self._blocks = blocks
        self._exchange = exchange
        self._backward = backward
        self._parameters = weaving.trained
        self._waiting = blocks.waiting = waiting
        self._noting: AbstractContextManager[object] = nullcontext()
        self._is_running = False
        self._is_empty = False  # this rank has no part in the batch
        self._kept: dict[str, Tensor] = {}  # pieces of earlier backward calls, while one runs
        backward.models.append(self)
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))
        weaving.attached += blocks.attached
        for model in weaving.models:
            self._attach(model, weaving)
        for optimizer in weaving.optimizers:
            optimizer.register_step_pre_hook(lambda *_: blocks.end())  # of a forward that had no backward

    def _attach(self, model: nn.Module, weaving: Weaving) -> None:
        before = model.register_forward_pre_hook(OwnHook(self._before), prepend=True)
        after = model.register_forward_hook(OwnHook(self._after), always_call=True)
        weaving.attached += [(model._forward_pre_hooks, before.id), (model._forward_hooks, after.id)]

    # Forward.

    def _before(self, *_: Any) -> None:
        self._blocks.begin()
        self._noting = self._blocks.noting()
        self._noting.__enter__()

    def _after(self, _model: nn.Module, _inputs: Any, outputs: Any) -> None:
        self._noting.__exit__(None, None, None)
        self._noting = nullcontext()
        found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for leaf in found:
            leaf.register_hook(self._begin_backward)
        if not found:
            self._blocks.end(failed=outputs is None)

    # Backward.

    def _begin_backward(self, _gradient: Tensor) -> None:
        """Its outputs' gradients are the first to come. A gradient that is there is one of a piece."""
        if not self._is_running:
            self._blocks.resume()
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    # The memory of sums is written again in this backward.
                    self._kept[name], parameter.grad = parameter.grad.clone(), None

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if not self._is_running:
                self._is_running = True
                weight = self._backward.weight
                self._exchange.begin(weight)
                self._is_empty = weight == 0
                self._backward.begin(self)
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and shares_memory(gradient):
                gradient = gradient.clone()
            if self._is_empty:  # 0 times infinite would be no 0 on the other ranks
                gradient = None
            self._exchange.add(name, gradient)

        return add

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters.values())

    @torch.no_grad()
    def end(self) -> None:
        """Wait for the exchange; parameters and gradients are pieces."""
        self._is_running = False
        with self._waiting:
            _, sums = self._exchange.wait()
        self._blocks.end()
        kept, self._kept = self._kept, {}
        for name, parameter in self._parameters.items():
            total = sums.get(name)
            if total is None and name in self._exchange.present:
                total = parameter.new_zeros(parameter.shape)  # of which this rank has nothing
            before = kept.get(name)
            parameter.grad = before if total is None else total if before is None else before.add_(total)
        self._backward.exchanged.update(self._parameters)
