"""Stage modules: the layers of one stage at the paths that they have in the whole model, and the calls that use them.

whole model   transformer.wte  transformer.h.0  transformer.h.1  lm_head (its weight is wte's)
stage 0       transformer.wte  transformer.h.0
stage 1       transformer.wte  transformer.h.1  lm_head          wte holds the tied weight under its own name
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from weft.distributed.placement.pipeline.partition_calls import (
    Call,
    Capture,
    Value,
    attributes_of,
    map_structure,
    run_call,
    values_of,
)
from weft.distributed.placement.pipeline.partition_units import free_calls
from weft.distributed.placement.pipeline.stages import INPUT, OUTPUT, Partition, StageProgram
from weft.errors import GraphError

__all__ = ["build_stages"]


@dataclass(frozen=True)
class _Program:
    """The calls of a stage; `last_use` are the values that nobody needs after each of them."""

    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output: Any  # the structure that the model returns, of the last stage
    numbers: frozenset[str]
    last_use: tuple[tuple[str, ...], ...]


@final
class StageModule(nn.Module):
    """The layers of a stage. Sizes that come from another stage are tensors of one number on the way."""

    def __init__(self, program: _Program) -> None:
        super().__init__()
        self._weft_program = program

    def forward(self, *values: Any) -> tuple[Any, ...]:
        program = self._weft_program
        known = {
            name: int(value) if name in program.numbers else value
            for name, value in zip(program.inputs, values, strict=True)
        }
        for call, unused in zip(program.calls, program.last_use, strict=True):
            known |= zip(call.outputs, run_call(call, self, known), strict=True)
            for name in unused:
                del known[name]
        if program.outputs == (OUTPUT,):
            return (map_structure(lambda leaf: known[leaf.id] if isinstance(leaf, Value) else leaf, program.output),)
        return tuple(torch.tensor(known[v]) if v in program.numbers else known[v] for v in program.outputs)


def build_stages(capture: Capture, module: nn.Module, stages: Sequence[Sequence[Call]]) -> Partition:
    """The stages of a model whose calls, but those of its inputs alone, are dealt to stages in their order."""
    free = free_calls(capture)
    programs = _programs(capture, stages, free)
    names = {id(tensor): name for name, tensor in (*module.named_buffers(), *module.named_parameters())}
    held = [_held(program.calls, module, names) for program in programs]
    _deal_unused(held, module)
    modules = [_build(program, module, own) for program, own in zip(programs, held, strict=True)]
    holders: dict[str, list[int]] = {name: [] for name, _ in module.named_parameters()}
    for stage, built in enumerate(modules):
        for name, _ in built.named_parameters():
            holders[name].append(stage)
    tied = {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}
    rows = zip(modules, programs, strict=True)
    return Partition(tuple(StageProgram(built, program.inputs, program.outputs) for built, program in rows), tied)


def _programs(capture: Capture, stages: Sequence[Sequence[Call]], free: frozenset[Call]) -> list[_Program]:
    maker = {value: call for call in capture.calls for value in call.outputs}
    home = {value: stage for stage, calls in enumerate(stages) for call in calls for value in call.outputs}
    order = {call: number for number, call in enumerate(capture.calls)}
    inputs: list[tuple[str, ...]] = []
    everything: list[tuple[Call, ...]] = []
    for stage, calls in enumerate(stages):
        wanted = [values_of((call.arguments, call.in_evaluation)) for call in calls]
        wanted += [values_of(capture.output)] if stage == len(stages) - 1 else []
        repeated = _behind((value for row in wanted for value in row), maker, free)
        all_calls = sorted({*calls, *repeated}, key=order.__getitem__)
        wanted += [values_of((call.arguments, call.in_evaluation)) for call in repeated]
        foreign = {value for row in wanted for value in row} - {value for call in all_calls for value in call.outputs}
        _check_writes(calls, foreign)
        ordered = sorted(foreign, key=lambda value: (value in maker, order.get(maker.get(value)), value))  # type: ignore[arg-type]
        inputs.append(tuple(ordered))
        everything.append(tuple(all_calls))
    programs: list[_Program] = []
    for stage, calls_of_stage in enumerate(everything):
        later = dict.fromkeys(value for row in inputs[stage + 1 :] for value in row if home.get(value) == stage)
        outputs = (OUTPUT,) if stage == len(stages) - 1 else tuple(later)
        kept = values_of(capture.output) if outputs == (OUTPUT,) else outputs
        last_use = _last_uses(calls_of_stage, inputs[stage], kept)
        programs.append(_Program(calls_of_stage, inputs[stage], outputs, capture.output, capture.numbers, last_use))
    return programs


def _behind(values: Iterable[str], maker: Mapping[str, Call], free: frozenset[Call]) -> set[Call]:
    """The calls of inputs alone that these values need."""
    found: set[Call] = set()
    waiting = [value for value in values if not value.startswith(INPUT)]
    while waiting:
        call = maker[waiting.pop()]
        if call in free and call not in found:
            found.add(call)
            waiting += [value for value in values_of(call.arguments) if not value.startswith(INPUT)]
    return found


def _check_writes(calls: Iterable[Call], foreign: set[str]) -> None:
    for call in calls:
        first = call.arguments[0][0] if call.writes else None
        if isinstance(first, Value) and first.id in foreign:
            raise GraphError(f"forward writes a tensor of another stage in place ({call.name}); compute a new tensor")


def _last_uses(calls: Sequence[Call], inputs: Sequence[str], kept: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    last = dict.fromkeys(inputs, -1)
    for number, call in enumerate(calls):
        last |= dict.fromkeys((*call.outputs, *values_of((call.arguments, call.in_evaluation))), number)
    rows: list[list[str]] = [[] for _ in calls]
    for value, number in last.items():
        if value not in kept and number >= 0:
            rows[number].append(value)
    return tuple(map(tuple, rows))


@dataclass(frozen=True)
class _Held:
    """The holdings of a stage: modules whole, by path, and tensors alone, by name."""

    modules: dict[str, nn.Module]
    tensors: set[str]


def _held(calls: Sequence[Call], module: nn.Module, names: Mapping[int, str]) -> _Held:
    modules = {call.target: module.get_submodule(call.target) for call in calls if isinstance(call.target, str)}
    tensors = {name for call in calls for name in attributes_of((call.arguments, call.in_evaluation))}
    for own in modules.values():  # a tied weight keeps the name that the whole model has for it
        tensors |= {names[id(tensor)] for tensor in (*own.parameters(), *own.buffers()) if id(tensor) in names}
    held = _Held(modules, set())
    for name in sorted(tensors):
        _hold(held, module, name)
    return held


def _hold(held: _Held, module: nn.Module, name: str) -> None:
    """A tensor that is all its layer has comes with the layer, so that rules for layers find it."""
    path, _, last = name.rpartition(".")
    if any(path == other or path.startswith(f"{other}.") for other in held.modules):
        return
    layer = module.get_submodule(path)
    inside = [*layer.named_parameters(), *layer.named_buffers()]
    if path and [row[0] for row in inside] == [last] and type(layer).__module__.startswith("torch.nn"):
        held.modules[path] = layer
    else:
        held.tensors.add(name)


def _deal_unused(held: Sequence[_Held], module: nn.Module) -> None:
    """A tensor that no call reads stays with the one before it in the model, so that a checkpoint has it."""
    stage = 0
    for name, _ in (*module.named_parameters(), *module.named_buffers()):
        path = name.rpartition(".")[0]
        holders = [
            number
            for number, own in enumerate(held)
            if name in own.tensors or any(path == at or path.startswith(f"{at}.") for at in own.modules)
        ]
        if holders:
            stage = holders[0]
        else:
            held[stage].tensors.add(name)


def _build(program: _Program, module: nn.Module, held: _Held) -> StageModule:
    """In the order of the whole model, in which the first name of a tied weight is its name."""
    stage = StageModule(program)
    inside: set[str] = set()
    for path, part in module.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{other}.") for other in inside):
            continue
        if path in held.modules:
            _holder(stage, path.rpartition(".")[0]).add_module(path.rpartition(".")[2], part)
            inside.add(path)
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if (f"{path}.{name}" if path else name) in held.tensors:
                _holder(stage, path).register_parameter(name, parameter)
        for name, buffer in part.named_buffers(recurse=False):
            if (f"{path}.{name}" if path else name) in held.tensors:
                is_kept = name not in part._non_persistent_buffers_set
                _holder(stage, path).register_buffer(name, buffer, persistent=is_kept)
    stage.training = module.training
    return stage


def _holder(stage: nn.Module, path: str) -> nn.Module:
    """The module at a path, made empty where there is none."""
    found = stage
    for name in filter(None, path.split(".")):
        child = found._modules.get(name)
        if child is None:
            child = nn.Module()
            found.add_module(name, child)
        found = child
    return found
