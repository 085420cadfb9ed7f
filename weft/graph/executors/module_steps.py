"""A module and its loss as steps that `capture` takes: to train by gradients, to train with the update, to infer.

The state is `{"parameters", "buffers"}`, with the update also what it remembers (`"memory"`); the batch is
`{"inputs", "targets"}`, with the update also what it is told (`"settings"`: the learning rate).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.graph.capture.capture import Step
from weft.graph.executors.executor import Loss

__all__ = ["UpdateFunction", "inference_step", "training_step", "updating_step"]

UpdateFunction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Any, Any], tuple[Mapping[str, Tensor], Any]]
"""`update(gradients, parameters, memory, settings) -> (new parameters, new memory)`, pure, by name.

There is no gradient for a parameter that has no part in the loss, and no new value for one that stays."""


def training_step(
    module: nn.Module, loss: Loss, *, autocast: torch.dtype | None = None, channels_last: bool = False
) -> Step:
    """A step that returns loss, predictions and gradients by name; the state stays as it is, but for buffers.

    A gradient has the strides of its parameter, as autograd would accumulate it; names of parameters that have none are
    listed under `unused`.

    Args:
        loss: `loss(predictions, *targets)`, a scalar.
        autocast: the type in which matrix products are computed, by torch's rules; None is as it is.
        channels_last: lay images out with their channels together, which convolutions are faster on; it may round
            differently.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters = {name: tensor.detach() for name, tensor in state["parameters"].items()}
        wanted = [parameters[name].requires_grad_() for name in trainable]
        with torch.enable_grad():
            with _use_autocast(parameters, autocast):
                inputs = _laid_out_for(module, batch["inputs"], channels_last)
                predictions = functional_call(module, (parameters, state["buffers"]), inputs)
                value = loss(predictions, *batch["targets"])
            gradients = torch.autograd.grad(value, wanted, allow_unused=True)
        found = {n: g for n, g in zip(trainable, gradients, strict=True) if g is not None}
        outputs = {
            "loss": value.detach(),
            "predictions": predictions.detach(),
            "gradients": {name: _laid_out(gradient, parameters[name]) for name, gradient in found.items()},
            "unused": [name for name in trainable if name not in found],
        }
        return outputs, state

    return step


def updating_step(
    module: nn.Module,
    loss: Loss,
    update: UpdateFunction,
    *,
    autocast: torch.dtype | None = None,
    channels_last: bool = False,
) -> Step:
    """A step that returns loss and predictions; its new state is as the update leaves it.

    Args:
        update: from gradients to new parameters and memory, pure; see `UpdateFunction`.
        autocast, channels_last: as in `training_step`.
    """
    gradients_of = training_step(module, loss, autocast=autocast, channels_last=channels_last)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, after = gradients_of(state, batch)
        found, memory = update(outputs["gradients"], state["parameters"], state["memory"], batch["settings"])
        parameters = {name: found.get(name, old) for name, old in state["parameters"].items()}
        shown = {name: outputs[name] for name in ("loss", "predictions")}
        return shown, {"parameters": parameters, "buffers": after["buffers"], "memory": memory}

    return step


def inference_step(
    module: nn.Module, loss: Loss, *, autocast: torch.dtype | None = None, channels_last: bool = False
) -> Step:
    """A step that returns loss and predictions without gradients; arguments are those of `training_step`."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        with torch.no_grad(), _use_autocast(state["parameters"], autocast):
            inputs = _laid_out_for(module, batch["inputs"], channels_last)
            predictions = functional_call(module, (state["parameters"], state["buffers"]), inputs)
            return {"loss": loss(predictions, *batch["targets"]), "predictions": predictions}, state

    return step


def _use_autocast(parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> torch.autocast:
    device = next(iter(parameters.values())).device.type if parameters else "cpu"
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


def _laid_out_for(module: nn.Module, inputs: Sequence[Tensor], channels_last: bool) -> tuple[Tensor, ...]:
    if not channels_last or not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return tuple(inputs)
    return tuple(x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient.detach()
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient.detach())
