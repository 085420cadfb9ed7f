"""Gradients of micro-batches added up, and handed over as soon as they are complete.

    backward of the last micro-batch     [layer 3][layer 2][layer 1]
    handed over                                  ^        ^        ^       exchange over replicas begins meanwhile

A parameter that several stages hold (tied weights) gets a gradient in each of them. They are added up, in the order of
stages, on every one: so all make the same update.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.placement.pipeline.put_off import Grow
from weft.distributed.placement.pipeline.transport import Transport
from weft.graph import GradientSink
from weft.torch_private import shares_memory

__all__ = ["AbstractCompletion", "Completion"]


class AbstractCompletion(ABC):
    """Where the gradients of a rank's backward passes go."""

    @abstractmethod
    def begin_last(self, chunk: int) -> None:
        """The pass that follows is the last of a chunk that makes gradients of parameters."""

    @abstractmethod
    def end_last(self, chunk: int) -> None:
        """Parameters that had no part in that pass have their gradient all the same."""

    @abstractmethod
    def grow(self, name: str, grow: Grow) -> None:
        """A gradient that was put off is made."""


@final
class Completion(AbstractCompletion):
    """The gradients of one rank's parameters: `begin` a step, let backward passes fill `.grad`, `end` passes, `finish`.

    Args:
        parameters: that are trained, by name.
        chunks: of each chunk of this rank, the names of its parameters.
        tied: every parameter that several stages hold, on this rank or not, and those stages.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        chunks: Iterable[Iterable[str]],
        tied: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._parameters = parameters
        self._chunks = [[name for name in names if name in parameters] for names in chunks]
        self._tied = {name: stages for name, stages in tied.items() if name in parameters}
        self._numbers = {name: i for i, name in enumerate(sorted(tied))}  # the same on every rank
        self._sink: GradientSink | None = None
        self._left: dict[str, int] = {}
        self._complete: set[str] = set()
        self._waiting: dict[str, Tensor | None] = {}
        self._last: int | None = None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))

    def begin(self, on_gradient: GradientSink) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None  # left by a use of the module outside the executor, it would be added to ours
        self._sink = on_gradient
        self._left = dict.fromkeys(self._parameters, 0)
        for names in self._chunks:
            for name in names:
                self._left[name] += 1
        self._complete, self._waiting, self._last = set(), {}, None

    def begin_last(self, chunk: int) -> None:
        self._last = chunk

    def end_last(self, chunk: int) -> None:
        self._last = None
        for name in self._chunks[chunk]:
            self._left[name] -= 1
            if self._left[name] == 0 and name not in self._complete:
                self._hand_over(name)

    def grow(self, name: str, grow: Grow) -> None:
        parameter = self._parameters[name]
        parameter.grad = grow(parameter.grad)
        self._note(name)

    def finish(self, transport: Transport) -> None:
        """Add up the gradients of tied parameters over their stages. Called by all stages."""
        numbers = self._numbers
        own = {name: self._dense(name) for name in self._tied}
        everyone = transport.exchange({numbers[name]: (own[name], self._tied[name]) for name in self._tied})
        sink, self._sink = self._sink, None
        assert sink is not None, "begin() comes first"
        for name in self._tied:
            first, *others = everyone[numbers[name]]
            total = first.clone() if first is own[name] else first  # it may be on its way to others still
            for other in others:
                total.add_(other)
            sink(name, total)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(_parameter: Tensor) -> None:
            if self._sink is not None:
                self._note(name)

        return hook

    def _note(self, name: str) -> None:
        """The gradient of a parameter has grown; it is complete if this was the last pass of its last chunk."""
        if self._last is not None and self._left[name] == 1 and name not in self._complete:
            self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        parameter = self._parameters[name]
        gradient, parameter.grad = parameter.grad, None
        # Views on the way back make autograd hand one piece of memory to two parameters, or keep it for itself.
        if gradient is not None and shares_memory(gradient):
            gradient = gradient.clone()
        self._complete.add(name)
        if name in self._tied:
            self._waiting[name] = gradient
        else:
            assert self._sink is not None, "begin() comes first"
            self._sink(name, gradient)

    def _dense(self, name: str) -> Tensor:
        gradient = self._waiting.pop(name)
        return torch.zeros_like(self._parameters[name]) if gradient is None else gradient.contiguous()
