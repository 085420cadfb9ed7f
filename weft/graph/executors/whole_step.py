"""The whole training step as one program: forward, loss, backward and update, the new state written over the old.

    state, memory, batch --> | forward | loss | backward and, gradient by gradient, update | --> loss, predictions
       ^          ^                       |                                                          |
       |          |                       +-- not finite: the update is left out                     |
       +----------+----------------------------------------------------------------------------------+

It is for one rank: nobody sees the gradients. Ranks that exchange them take an executor and its sink.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import GraphError
from weft.graph.capture.capture import capture
from weft.graph.executors.executor import Loss, Outputs, State
from weft.graph.executors.module_steps import UpdateFunction, updating_step
from weft.graph.ir.pytree import flatten, paths_of
from weft.graph.memory_plan import Arena, PlannedProgram, Signature, fused_program
from weft.graph.programs.program import ProgramCache, refuse
from weft.graph.rewrites import rewrite
from weft.specs import Batch

__all__ = ["WholeStep"]

_NUM_KEPT = 4  # programs: a few shapes of batch


@dataclass(frozen=True)
class _Flat:
    """State and memory as a list of tensors; `parts` are the objects that they were taken from."""

    parts: tuple[object, ...]
    leaves: list[Tensor]
    form: int

    def is_of(self, parts: tuple[object, ...]) -> bool:
        return all(a is b for a, b in zip(parts, self.parts, strict=True))


class WholeStep:
    """Trains a module by an update, to the bits of eager mode unless it is fused.

    State and memory are consumed: their tensors are written over, and come back with the new values. A loss that is not
    finite leaves parameters and memory as they were.

    Args:
        module: its parameters and buffers are the initial state.
        loss: `loss(predictions, *targets)`, a scalar.
        update: gives the new parameters; see `UpdateFunction`.
        autocast: the type in which matrix products are computed, by torch's rules (bfloat16 on CPU); None is as it is.
        fused: compile element-wise parts of the graph by Inductor, and lay images out with their channels together;
            both may round differently.
        folder: where the generated code is kept; by default a folder of the user's cache.

    >>> def descend(gradients, parameters, memory, lr):
    ...     return {name: parameters[name] - lr * gradient for name, gradient in gradients.items()}, memory
    >>> model = nn.Linear(2, 1)
    >>> step = WholeStep(model, nn.functional.mse_loss, descend)
    >>> state = State(dict(model.named_parameters()), {}, torch.get_rng_state())
    >>> outputs, state, memory = step(state, {}, Batch((torch.ones(3, 2),), (torch.zeros(3, 1),)), torch.tensor(0.1))
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        update: UpdateFunction,
        *,
        autocast: torch.dtype | None = None,
        fused: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._module = module
        self._step = updating_step(module, loss, update, autocast=autocast, channels_last=fused)
        self._fused, self._folder = fused, folder
        self._arena = Arena()
        self._programs = ProgramCache[PlannedProgram](_NUM_KEPT)
        self._forms: dict[Hashable, int] = {}
        self._flat = _Flat((None, None, None), [], -1)

    def __call__(self, state: State, memory: Any, batch: Batch, settings: Any) -> tuple[Outputs, State, Any]:
        """One step.

        Args:
            memory: what the update keeps from step to step, such as momentum: a nested dict of tensors.
            settings: what the update is told anew each time, as tensors: the learning rate.
        """
        program = self.program(state, memory, batch, settings)
        given, _ = flatten(_data(batch, settings))
        results, random = program.run([*self._flat.leaves, *given], refuse, state.random)
        assert random is not None
        places = dict(paths_of(program.graph.results))
        outputs = Outputs(*(results[places[f"outputs.{name}"]] for name in ("loss", "predictions")))
        return outputs, State(state.parameters, state.buffers, random), memory

    def program(self, state: State, memory: Any, batch: Batch, settings: Any) -> PlannedProgram:
        """The program for a state and batch of this form; captured now if it has not been."""
        parts = state.parameters, state.buffers, memory
        if not self._flat.is_of(parts):
            leaves, tree = flatten(_state(state, memory))
            form = self._forms.setdefault((tree, _shapes(leaves)), len(self._forms))
            self._flat = _Flat(parts, leaves, form)
        given, tree = flatten(_data(batch, settings))
        key = self._flat.form, tree, _shapes(given)
        return self._programs.get(key, lambda: self._captured(state, memory, batch, settings))

    def _captured(self, state: State, memory: Any, batch: Batch, settings: Any) -> PlannedProgram:
        self._module.train()
        tensors, data = _state(state, memory), _data(batch, settings)
        graph = rewrite(capture(self._step, tensors, data))
        if len(graph.placeholders) != len(flatten(tensors)[0]) + len(flatten(data)[0]):
            raise GraphError("a tensor of the batch is also in the state; clone it")
        signature = Signature(replaced=("state",), guard="loss")
        return fused_program(graph, signature, may_round=self._fused, arena=self._arena, folder=self._folder)


def _state(state: State, memory: Any) -> dict[str, Any]:
    return {"parameters": state.parameters, "buffers": state.buffers, "memory": memory}


def _data(batch: Batch, settings: Any) -> dict[str, Any]:
    return {"inputs": batch.inputs, "targets": batch.targets, "settings": settings}


def _shapes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)
