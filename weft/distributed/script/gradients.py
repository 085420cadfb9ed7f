"""Gradients of synchronous ranks, averaged in buckets while the script's backward runs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from weft.distributed.placement import DataParallel
from weft.distributed.script.shares import BatchShare
from weft.graph import State
from weft.torch_private import shares_memory

__all__ = ["GradientHooks"]


class GradientHooks:
    """Averages the gradients of a module's parameters during its backward; kept alive by the hooks themselves.

    Every rank leaves backward with the same gradients, so that one that was there before (accumulation) is the same on
    all ranks, and averaging it once more changes nothing.
    """

    def __init__(self, replicas: DataParallel, model: nn.Module, share: BatchShare, keep: object) -> None:
        self._keep = keep
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._share = share
        self._is_running = False
        self._untouched: set[str] = set()  # by the backward that runs
        replicas.join(State(dict(model.named_parameters()), dict(model.named_buffers()), torch.empty(0)))
        self._exchange = replicas.exchange
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            if not self._is_running:
                self._is_running, self._untouched = True, set(self._parameters)
                self._exchange.begin(self._share.weight)
                # autograd calls it when the whole of this backward is done, as DDP has it do.
                Variable._execution_engine.queue_callback(self._end)
            # Views on the way back give two parameters one piece of memory, which would be averaged twice in place.
            if parameter.grad is not None and shares_memory(parameter.grad):
                parameter.grad = parameter.grad.clone()
            self._untouched.discard(name)
            self._exchange.add(name, parameter.grad)

        return add

    @torch.no_grad()
    def _end(self) -> None:
        self._is_running = False
        for name in self._parameters:
            if name in self._untouched:  # what an earlier backward left there counts, should another rank add to it
                self._exchange.add(name, self._parameters[name].grad)
        _, sums = self._exchange.wait()
        own: list[Tensor] = []
        packed: list[Tensor] = []
        for name, parameter in self._parameters.items():
            total = sums[name]
            if total is None or total is parameter.grad:
                continue
            if parameter.grad is None:
                parameter.grad = total.clone()
            else:
                own.append(parameter.grad)
                packed.append(total)
        if own:  # one call for all: they are small and many
            torch._foreach_copy_(own, packed)
