"""Running a loop: forward, keeping some states, and in reverse, computing the others again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.graph.formats.loop_bodies import find_body
from weft.graph.ir.pytree import unflatten
from weft.graph.ir.symbolic_sizes import resolved, shape_of
from weft.graph.loops.checkpoint_schedule import schedule
from weft.graph.loops.gradient import backward_program, forward_program, is_differentiable
from weft.graph.programs.program import measure_sizes, refuse

__all__ = ["LoopCall", "Tensors", "outputs_like", "run_backward", "run_forward"]

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class LoopCall:
    """The arguments of a loop operator."""

    key: str  # of the body
    count: Any  # of iterations; it may be a symbol
    captured: Tensors
    carried: Tensors  # into the first iteration
    inputs: Tensors
    checkpoints: int

    @property
    def tensors(self) -> Tensors:
        return *self.captured, *self.carried, *self.inputs


def outputs_like(call: LoopCall) -> list[Tensor]:
    """Memory for the outputs of all iterations; what it holds is undefined."""
    body, carried = find_body(call.key), [tensor.shape for tensor in call.carried]
    shapes = [*carried, (), *(t.shape[1:] for t in call.inputs), *(t.shape for t in call.captured)]
    sizes = {name: shapes[place][dim] for name, (place, dim) in body.sizes.items()}
    likes = [node.meta["val"] for node in body.result_nodes[len(carried) :]]
    return [
        torch.empty((call.count, *resolved(shape_of(like), sizes)), dtype=like.dtype, device=like.device)
        for like in likes
    ]


def run_forward(call: LoopCall, to_keep: Sequence[int] = (), kept: Tensors = ()) -> list[Tensor]:
    """The values carried after the last iteration, then the outputs. States before `to_keep` are copied to `kept`."""
    run, state, outputs = _Iterations(call), _dense(call.carried), outputs_like(call)
    places = {step: place for place, step in enumerate(to_keep)}
    for step in range(call.count):
        if step in places:
            _store(state, [tensor[places[step]] for tensor in kept])
        state, made = run(step, state)
        _store(made, [tensor[step] for tensor in outputs])
    return [*_owned(state, call.tensors), *outputs]


def run_backward(call: LoopCall, kept: Mapping[int, Tensors], gradients: Tensors) -> list[Tensor]:
    """The gradients of what is differentiable of the captured, of what was carried first, and of the inputs."""
    run, reverse = _Iterations(call), _Reverse(call, gradients)
    states: dict[int, Tensors] = {0: _dense(call.carried), **kept}
    for action in schedule(call.count, call.checkpoints):
        state = states[action.begin]
        for step in range(action.begin, action.step):
            state, _ = run(step, state)
        if action.kind == "keep":
            states[action.step] = state
        else:
            reverse(run.arguments(action.step, state), action.step)
            states.pop(action.step, None)
    found = [*reverse.of_captured(), *reverse.of_carried, *reverse.of_inputs]
    return _owned(found, (*call.tensors, *gradients))


class _Iterations:
    """Takes one iteration at a time."""

    def __init__(self, call: LoopCall) -> None:
        self._program = forward_program(call.key)
        self._captured, self._inputs = _dense(call.captured), _dense(call.inputs)

    def arguments(self, step: int, state: Tensors) -> list[Tensor]:
        return [*state, torch.tensor(step), *(tensor[step] for tensor in self._inputs), *self._captured]

    def __call__(self, step: int, state: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        results, _ = self._program.run(self.arguments(step, state), refuse, None)
        return _dense(results[: len(state)]), results[len(state) :]


class _Reverse:
    """Takes iterations in reverse, and adds up what the gradients of each come to, those of the last one first."""

    def __init__(self, call: LoopCall, gradients: Tensors) -> None:
        self._program = backward_program(call.key)
        num_carried = sum(map(is_differentiable, call.carried))
        self.of_carried = list(gradients[:num_carried])
        self.of_inputs = [torch.zeros_like(tensor) for tensor in call.inputs if is_differentiable(tensor)]
        self._of_outputs = gradients[num_carried:]
        self._captured = [tensor for tensor in call.captured if is_differentiable(tensor)]
        self._sums: list[Tensor | None] = [None] * len(self._captured)

    def __call__(self, arguments: list[Tensor], step: int) -> None:
        given = [*arguments, *_dense(self.of_carried), *_dense([tensor[step] for tensor in self._of_outputs])]
        if self._program.graph.conditions:
            measure_sizes(self._program.graph, given)
        results, _ = self._program.run(given, refuse, None)
        found = iter(unflatten(self._program.graph.results, results)["outputs"])
        self.of_carried = [_or_zeros(next(found), before) for before in self.of_carried]
        for whole in self.of_inputs:
            part = next(found)
            if part is not None:
                whole[step].copy_(part)
        for place, part in enumerate(found):
            before = self._sums[place]
            self._sums[place] = before if part is None else part if before is None else before + part

    def of_captured(self) -> list[Tensor]:
        return [_or_zeros(total, like) for total, like in zip(self._sums, self._captured, strict=True)]


def _dense(tensors: Tensors) -> list[Tensor]:
    return [tensor.detach().contiguous() for tensor in tensors]


def _store(values: Tensors, places: Tensors) -> None:
    for value, place in zip(values, places, strict=True):
        place.copy_(value)


def _or_zeros(tensor: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def _owned(tensors: Tensors, others: Tensors) -> list[Tensor]:
    """The tensors, each with memory of its own: an operator returns nothing that it was given, and nothing twice."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    owned = []
    for tensor in tensors:
        where = tensor.untyped_storage().data_ptr()
        owned.append(tensor.clone(memory_format=torch.contiguous_format) if where in taken else tensor.contiguous())
        taken.add(where)
    return owned
