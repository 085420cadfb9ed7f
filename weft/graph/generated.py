"""The graph executor: the step captured once for each shape of batch, and run as generated Python."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weft.graph.capture import Step, capture
from weft.graph.eager import EagerExecutor
from weft.graph.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.program import Program
from weft.graph.rewrites import rewrite
from weft.graph.structure import fill, pick
from weft.specs import Batch

__all__ = ["GraphExecutor", "inference_step", "training_step"]

_NUM_KEPT = 8  # programs: a few shapes of batch, for training and for inference


class GraphExecutor(AbstractExecutor):
    """Computes the bits of the eager executor, from graphs.

    A graph is captured when a batch of a new shape comes (the last one of an epoch may be smaller), for training and
    for inference apart; the latest few are kept.

    Args:
        folder: where the generated code is kept; by default a folder of the user's cache.
    """

    def __init__(self, module: nn.Module, loss: Loss, *, folder: Path | None = None) -> None:
        self._module = module
        self._loss = loss
        self._folder = folder
        self._eager = EagerExecutor(module, loss)  # holds the module's own tensors, and can find a bad one
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def initial_state(self) -> State:
        return self._eager.initial_state()

    def __call__(self, state: State, batch: Batch, on_gradient: GradientSink) -> tuple[Outputs, State]:
        outputs, after = self._run(state, batch, on_gradient, is_training=True)
        for name in outputs["unused"]:
            on_gradient(name, None)
        return Outputs(outputs["loss"].detach(), outputs["predictions"].detach()), after

    def infer(self, state: State, batch: Batch) -> Outputs:
        outputs, _ = self._run(state, batch, _ignore, is_training=False)
        return Outputs(outputs["loss"].detach(), outputs["predictions"].detach())

    def first_bad_tensor(self, state: State, batch: Batch) -> str | None:
        return self._eager.first_bad_tensor(state, batch)

    def program(self, state: State, batch: Batch, *, is_training: bool = True) -> Program:
        """What runs for a batch of this shape; captured now if it has not been."""
        tensors, data = _plain(state, batch)
        leaves = (*state.parameters.values(), *state.buffers.values(), *batch.inputs, *batch.targets)
        key = is_training, len(batch.inputs), tuple((t.shape, t.stride(), t.dtype, t.device) for t in leaves)
        if key in self._programs:
            self._programs.move_to_end(key)
            return self._programs[key]
        self._module.train(is_training)
        make_step = training_step if is_training else inference_step
        graph = rewrite(capture(make_step(self._module, self._loss), tensors, data))
        self._programs[key] = Program(graph, sunk="gradients", folder=self._folder)
        if len(self._programs) > _NUM_KEPT:
            self._programs.popitem(last=False)
        return self._programs[key]

    def _run(
        self, state: State, batch: Batch, sink: GradientSink, *, is_training: bool
    ) -> tuple[Mapping[str, Any], State]:
        program = self.program(state, batch, is_training=is_training)
        tensors, data = _plain(state, batch)
        graph = program.graph
        inputs = pick(graph.arguments, {"state": tensors, "batch": data}, len(graph.placeholders))
        results, random = program.run(inputs, sink, state.random)
        filled = fill(graph.results, results)
        assert random is not None
        return filled["outputs"], State(state.parameters, filled["state"]["buffers"], random)


def training_step(module: nn.Module, loss: Loss) -> Step:
    """Loss, predictions and gradients by name, as a step that `capture` takes.

    The state is `{"parameters", "buffers"}`, the batch `{"inputs", "targets"}`. A gradient has the strides of its
    parameter, as autograd would accumulate it; names of parameters that have none are listed under `unused`.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        parameters = {name: tensor.detach() for name, tensor in state["parameters"].items()}
        wanted = [parameters[name].requires_grad_() for name in trainable]
        with torch.enable_grad():
            predictions = functional_call(module, (parameters, state["buffers"]), tuple(batch["inputs"]))
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


def inference_step(module: nn.Module, loss: Loss) -> Step:
    """Loss and predictions; the state stays as it is."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            predictions = functional_call(module, (state["parameters"], state["buffers"]), tuple(batch["inputs"]))
            return {"loss": loss(predictions, *batch["targets"]), "predictions": predictions}, state

    return step


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient.detach()
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient.detach())


def _plain(state: State, batch: Batch) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return (
        {"parameters": state.parameters, "buffers": state.buffers},
        {"inputs": batch.inputs, "targets": batch.targets},
    )


def _ignore(_name: str, _gradient: Tensor | None) -> None:
    """Inference hands nothing over."""
