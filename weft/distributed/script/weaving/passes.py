"""`forward_backward`: forward, loss and backward of a model as one call, which a pipeline cuts into micro-batches."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.distributed.script.weaving.stage_seam import AbstractStages
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import find_world
from weft.errors import UsageError

__all__ = ["forward", "forward_backward"]

Tensors = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]


def forward_backward(
    model: nn.Module, loss_function: Callable[..., Tensor], inputs: Tensors, targets: Tensor | tuple[Tensor, ...]
) -> Tensor:
    """Compute the loss of a batch, and add its gradients to those of the parameters.

    In one process, and under plans that do not cut a model into stages, it is

        loss = loss_function(model(*inputs), *targets)
        loss.backward()

    Under a plan with `pipeline` the batch goes through the stages in micro-batches. The optimizer, schedulers,
    `clip_grad_norm_` and `zero_grad` stay as they are.

    Args:
        model: woven, or not.
        loss_function: of the model's output and the targets: a mean over the samples.
        inputs: one tensor, several in the order of the model's arguments, or tensors by their names.
        targets: one tensor, or several.

    Returns:
        The loss, detached: of this rank's share of the batch.

    Example:

        loss = weft.forward_backward(model, nn.functional.cross_entropy, x, y)
        optimizer.step()
    """
    wanted = tuple(targets) if isinstance(targets, tuple | list) else (targets,)
    stages = _stages_of(model)
    if stages is not None:
        return stages.forward_backward(loss_function, _positional(inputs), wanted)
    loss = loss_function(_call(model, inputs), *wanted)
    loss.backward()
    return loss.detach()


@torch.no_grad()
def forward(model: nn.Module, inputs: Tensors) -> Any:
    """The model's output without gradients, in its present mode, also where it is cut into stages: every rank of a
    replica calls it with the same inputs, and gets the output.

    Between epochs of a woven loader `model(x)` does the same, as every rank holds the whole model then.
    """
    stages = _stages_of(model)
    return _call(model, inputs) if stages is None else stages.forward(_positional(inputs))


def _stages_of(model: nn.Module) -> AbstractStages | None:
    for weaving in weavings_of(find_world()):
        if weaving.stages is not None and any(woven is model for woven in weaving.models):
            return weaving.stages
    return None


def _call(model: nn.Module, inputs: Tensors) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _positional(inputs: Tensors) -> tuple[Tensor, ...]:
    if isinstance(inputs, Mapping):
        names = ", ".join(inputs)
        raise UsageError(f"stages take inputs by position (inputs: {names}); give them in the order of forward")
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
