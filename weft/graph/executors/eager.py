"""The eager executor: PyTorch's own autograd, with a hook on every parameter."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from weft.graph.executors.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.executors.non_finite import first_bad_in_forward, first_bad_of
from weft.graph.executors.random_state import get_random_state, use_random_state
from weft.specs import Batch
from weft.torch_private import shares_memory

__all__ = ["EagerExecutor"]


class EagerExecutor(AbstractExecutor):
    """Runs a module as it is; the state's tensors are the module's own, so that no step copies them.

    A state that came from elsewhere (a checkpoint, another rank) is copied in when it is first used.

        backward:   loss <- layer 3 <- layer 2 <- layer 1
        on_gradient:          |          |          |        each as soon as autograd has accumulated it

    Args:
        module: in float32 or another type; its parameters get a hook each.
        loss: `loss(predictions, *targets)`, a scalar.
        autocast: the type in which matrix products are computed, by torch's rules (bfloat16 on CPU); None is as it is.
    """

    def __init__(self, module: nn.Module, loss: Loss, *, autocast: torch.dtype | None = None) -> None:
        self._module = module
        self._loss = loss
        self._autocast = autocast
        self._sink: GradientSink | None = None
        self._parameters = dict(module.named_parameters())
        self._buffers = dict(module.named_buffers())
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._pending: set[str] = set()
        self._device = self._own_state(torch.empty(0)).device
        for name, parameter in self._trainable.items():
            parameter.register_post_accumulate_grad_hook(self._hand_over(name))

    @property
    def autocast(self) -> torch.dtype | None:
        """The type in which matrix products are computed; None as it is."""
        return self._autocast

    def initial_state(self) -> State:
        return self._own_state(get_random_state(self._device))

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        self._adopt(state)
        self._module.train()
        for parameter in self._trainable.values():
            parameter.grad = None  # left by a use of the module outside the executor, it would be added to ours
        self._sink, self._pending = on_gradient, set(self._trainable)
        with use_random_state(state.random, self._device):
            try:
                with self._use_autocast():
                    predictions = self._module(*batch.inputs)
                    loss = self._loss(predictions, *batch.targets)
                with self._use_this_thread():
                    loss.backward()
            finally:
                self._sink = None
            random = get_random_state(self._device)
        for name in sorted(self._pending):
            on_gradient(name, None)
        return Outputs(loss.detach(), predictions.detach()), self._own_state(random)

    def infer(self, state: State, batch: Batch) -> Outputs:
        self._adopt(state)
        self._module.eval()
        with use_random_state(state.random, self._device), torch.no_grad(), self._use_autocast():
            predictions = self._module(*batch.inputs)
            return Outputs(self._loss(predictions, *batch.targets), predictions)

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        self._adopt(state)
        self._module.train()
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        with use_random_state(state.random, self._device):
            try:
                return (
                    first_bad_of("input", {str(i): t for i, t in enumerate(batch.inputs)})
                    or first_bad_of("target", {str(i): t for i, t in enumerate(batch.targets)})
                    or first_bad_in_forward(self._module, batch)
                )
            finally:
                for name, buffer in self._buffers.items():
                    buffer.copy_(buffers[name])

    def _use_autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._autocast, enabled=self._autocast is not None)

    def _use_this_thread(self) -> AbstractContextManager[object]:
        """Autograd has a thread for each accelerator, in which hooks would run: a sink may wait for other ranks, and on
        the virtual cluster these share the device, and so the thread."""
        if self._device.type == "cpu":
            return nullcontext()
        return torch.autograd.set_multithreading_enabled(False)

    def _hand_over(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            # A module that is also used outside the executor keeps PyTorch's behaviour there.
            if self._sink is None:
                return
            gradient, parameter.grad = parameter.grad, None
            # Views on the way back make autograd hand one piece of memory to two parameters, or keep it for itself.
            if gradient is not None and shares_memory(gradient):
                gradient = gradient.clone()
            self._pending.discard(name)
            self._sink(name, gradient)

        return hook

    def _own_state(self, random: Tensor) -> State:
        return State(self._parameters, self._buffers, random)

    def _adopt(self, state: State) -> None:
        if state.parameters is self._parameters and state.buffers is self._buffers:
            return
        with torch.no_grad():
            for own, given in ((self._parameters, state.parameters), (self._buffers, state.buffers)):
                for name, tensor in own.items():
                    if given[name] is not tensor:
                        tensor.copy_(given[name])
