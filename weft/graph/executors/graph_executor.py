"""The graph executor: the step captured once for each shape of batch, and run as generated Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from weft.graph.capture.capture import capture
from weft.graph.executors.eager import EagerExecutor
from weft.graph.executors.executor import AbstractExecutor, GradientSink, Loss, Outputs, State
from weft.graph.executors.module_steps import UpdateFunction, inference_step, training_step
from weft.graph.executors.whole_step import WholeStep
from weft.graph.ir.graph import Graph
from weft.graph.ir.pytree import flatten_as, unflatten
from weft.graph.memory_plan import Arena, Signature, fused_program
from weft.graph.programs.program import AbstractProgram, MakeProgram, ProgramCache
from weft.graph.rewrites import rewrite
from weft.specs import Batch

__all__ = ["GraphExecutor", "HasPrograms"]

_NUM_KEPT = 8  # programs: a few shapes of batch, for training and for inference


class GraphExecutor(AbstractExecutor):
    """Computes from graphs: with the programs it makes by default, the bits of the eager executor.

    A graph is captured when a batch of a new shape comes (the last one of an epoch may be smaller), for training and
    for inference apart; the latest few are kept.

    Args:
        module: its parameters and buffers are the initial state.
        loss: `loss(predictions, *targets)`, a scalar.
        autocast: the type in which matrix products are computed, by torch's rules (bfloat16 on CPU); None is as it is.
        fused: compile element-wise parts of the graph by Inductor, and lay images out with their channels together;
            both may round differently.
        folder: where the generated code is kept; by default a folder of the user's cache.
        make_program: makes the program of a captured graph; by default generated Python.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        *,
        autocast: torch.dtype | None = None,
        fused: bool = False,
        folder: Path | None = None,
        make_program: MakeProgram | None = None,
    ) -> None:
        self._module = module
        self._loss = loss
        self._autocast = autocast
        self._make_program = make_program or _planner(fused, folder)
        self._has_plan = make_program is None
        self._fused, self._folder = fused, folder
        self._eager = EagerExecutor(module, loss, autocast=autocast)  # has the module's tensors, and can find a bad one
        self._programs = ProgramCache[AbstractProgram](_NUM_KEPT)

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

    def program(self, state: State, batch: Batch, *, is_training: bool = True) -> AbstractProgram:
        """The program for a batch of this shape; captured now if it has not been."""
        leaves = (*state.parameters.values(), *state.buffers.values(), *batch.inputs, *batch.targets)
        key = is_training, len(batch.inputs), tuple((t.shape, t.stride(), t.dtype, t.device) for t in leaves)
        return self._programs.get(key, lambda: self._captured(state, batch, is_training))

    def whole_step(self, update: UpdateFunction) -> WholeStep | None:
        """The step with its update in one graph; None for an executor whose programs cannot write in place."""
        if not self._has_plan:
            return None
        return WholeStep(
            self._module, self._loss, update, autocast=self._autocast, fused=self._fused, folder=self._folder
        )

    def _captured(self, state: State, batch: Batch, is_training: bool) -> AbstractProgram:
        self._module.train(is_training)
        make_step = training_step if is_training else inference_step
        step = make_step(self._module, self._loss, autocast=self._autocast, channels_last=self._fused)
        return self._make_program(rewrite(capture(step, *_plain(state, batch))), "gradients")

    def _run(
        self, state: State, batch: Batch, sink: GradientSink, *, is_training: bool
    ) -> tuple[Mapping[str, Any], State]:
        program = self.program(state, batch, is_training=is_training)
        tensors, data = _plain(state, batch)
        graph = program.graph
        inputs = flatten_as(graph.arguments, {"state": tensors, "batch": data}, len(graph.placeholders))
        results, random = program.run(inputs, sink, state.random)
        filled = unflatten(graph.results, results)
        assert random is not None
        buffers = state.buffers if self._has_plan else filled["state"]["buffers"]  # a plan writes over them
        return filled["outputs"], State(state.parameters, buffers, random)


@runtime_checkable
class HasPrograms(Protocol):
    """An executor that runs graphs, and gives the program of a batch: what profiles and proofs look into."""

    def program(self, state: State, batch: Batch, *, is_training: bool) -> AbstractProgram: ...


def _planner(fused: bool, folder: Path | None) -> MakeProgram:
    """Programs that reuse one piece of memory, and write running statistics over the old ones as modules do."""
    arena = Arena()

    def make(graph: Graph, sunk: str) -> AbstractProgram:
        signature = Signature(kept=("state.parameters",), replaced=("state.buffers",), sunk=sunk)
        return fused_program(graph, signature, may_round=fused, arena=arena, folder=folder)

    return make


def _plain(state: State, batch: Batch) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return (
        {"parameters": state.parameters, "buffers": state.buffers},
        {"inputs": batch.inputs, "targets": batch.targets},
    )


def _ignore(_name: str, _gradient: Tensor | None) -> None:
    """Inference hands nothing over."""
