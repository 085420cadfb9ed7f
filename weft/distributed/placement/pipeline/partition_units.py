"""The calls of a forward pass as a row of units, between which a model can be cut, and what each of them costs.

    calls     shape  arange | embed  add  dropout | blocks.0 | blocks.1 | norm | linear
    units                   | 0                   | 1        | 2        | 3    | 4
              '-- of the inputs alone: repeated by every stage that needs them, so that masks and positions, which all
                  blocks take, are not sent from stage to stage

A unit begins with a call that has parameters, and takes in those that follow it and have none.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from weft.distributed.placement.pipeline.partition_calls import (
    Call,
    Capture,
    attributes_of,
    map_structure,
    run_call,
    values_of,
)
from weft.distributed.placement.pipeline.stages import INPUT
from weft.metrics.timing import synchronise_device

__all__ = ["Unit", "find_units", "free_calls", "measure", "parameters_of", "use_untouched"]

_RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "uniform")
_REPEATS = 5
_FLOPS_PER_ELEMENT = 8  # element-wise work waits for memory; a product of matrices does as much per element it writes


@dataclass(frozen=True)
class Unit:
    """Calls that stay together.

    Args:
        parameters: their names, as the whole model has them.
        num_bytes: of these parameters.
        cost: of forward and backward, in seconds if they were measured.
        activations: bytes that wait for backward, of the sample batch.
    """

    calls: tuple[Call, ...]
    parameters: tuple[str, ...]
    num_bytes: int
    cost: float
    activations: int = 0

    @property
    def name(self) -> str:
        named = [call.name for call in self.calls if isinstance(call.target, str)]
        return named[0] if named else self.calls[0].name


def free_calls(capture: Capture) -> frozenset[Call]:
    """Calls that need nothing but inputs and buffers, and draw no random numbers."""
    found: set[Call] = set()
    known: set[str] = set()
    for call in capture.calls:
        needed = values_of(call.arguments)
        is_free = all(value in known or value.startswith(INPUT) for value in needed)
        if is_free and not isinstance(call.target, str) and not attributes_of(call.arguments) and not _is_random(call):
            found.add(call)
            known.update(call.outputs)
    return frozenset(found)


def _is_random(call: Call) -> bool:
    return any(word in call.name for word in _RANDOM)


def parameters_of(call: Call, module: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """The parameters that a call reads, by the names that the model has for them (`names`, by identity)."""
    if isinstance(call.target, str):
        inside = [names[id(parameter)] for parameter in module.get_submodule(call.target).parameters()]
    else:
        inside = []
    known = set(names.values())
    return tuple(dict.fromkeys([*inside, *(name for name in attributes_of(call.arguments) if name in known)]))


def find_units(capture: Capture, module: nn.Module) -> list[Unit]:
    """All units in their order; costs are numbers of parameters until something better is known."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    free = free_calls(capture)
    rows: list[tuple[list[Call], dict[str, None]]] = []
    for call in capture.calls:
        if call in free:
            continue
        own = dict.fromkeys(parameters_of(call, module, names))
        if not rows or (own and rows[-1][1]):
            rows.append(([], {}))
        rows[-1][0].append(call)
        rows[-1][1].update(own)
    return [
        Unit(tuple(calls), tuple(own), sum(sizes[name] for name in own), 1.0 + sum(sizes[name] for name in own))
        for calls, own in rows
    ]


def measure(
    units: Sequence[Unit], capture: Capture, module: nn.Module, inputs: Sequence[Tensor], *, by_time: bool
) -> list[Unit]:
    """The units with the cost of a forward and a backward pass of each: seconds, or operations, which are counted.

    Args:
        inputs: of the model, which is in training mode, and as it was afterwards.
    """
    known: dict[str, Any] = {f"{INPUT}{number}": tensor for number, tensor in enumerate(inputs)}
    with torch.no_grad():
        for call in (call for call in capture.calls if call in free_calls(capture)):
            known |= zip(call.outputs, run_call(call, module, known), strict=True)
    found: list[Unit] = []
    for unit in units:
        cost, activations, outputs = _measure(unit, module, known, by_time)
        found.append(replace(unit, cost=cost, activations=activations))
        known |= outputs
    return found


def _measure(
    unit: Unit, module: nn.Module, known: Mapping[str, Any], by_time: bool
) -> tuple[float, int, dict[str, Any]]:
    needed = {value: known[value] for call in unit.calls for value in values_of(call.arguments) if value in known}
    at_work = {value: map_structure(_leaf, found) for value, found in needed.items()}
    saved: dict[int, int] = {}
    own = {parameter.data_ptr() for parameter in module.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor.detach()  # an output that its own graph saves would keep it, and the shapes that it knows, alive

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        outputs = _run(unit, module, at_work)
    if not by_time:
        elements = sum(leaf.numel() for leaf in outputs.values() if isinstance(leaf, Tensor))
        return (
            3.0 * (counter.get_total_flops() + _FLOPS_PER_ELEMENT * elements),
            sum(saved.values()),
            _detached(outputs),
        )
    seconds = min(_time(unit, module, at_work) for _ in range(_REPEATS))
    return seconds, sum(saved.values()), _detached(outputs)


def _run(unit: Unit, module: nn.Module, known: Mapping[str, Any]) -> dict[str, Any]:
    values, outputs = dict(known), dict[str, Any]()
    for call in unit.calls:
        outputs |= zip(call.outputs, run_call(call, module, values | outputs), strict=True)
    return outputs


def _time(unit: Unit, module: nn.Module, known: Mapping[str, Any]) -> float:
    device = next((p.device for p in module.parameters()), None)
    synchronise_device(device)
    began = time.perf_counter()
    outputs = [leaf for leaf in _run(unit, module, known).values() if isinstance(leaf, Tensor) and leaf.grad_fn]
    wanted = [leaf for leaf in known.values() if isinstance(leaf, Tensor) and leaf.requires_grad]
    wanted += [
        p for p in map(dict(module.named_parameters()).get, unit.parameters) if p is not None and p.requires_grad
    ]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(leaf) for leaf in outputs], allow_unused=True)
    synchronise_device(device)
    return time.perf_counter() - began


def _leaf(found: Any) -> Any:
    if not isinstance(found, Tensor) or not found.is_floating_point():
        return found
    return found.detach().clone().requires_grad_()


def _detached(outputs: Mapping[str, Any]) -> dict[str, Any]:
    def detach(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, Tensor) else leaf

    return {value: map_structure(detach, found) for value, found in outputs.items()}


@contextmanager
def use_untouched(module: nn.Module) -> Iterator[None]:
    """After the block the module's statistics, mode and random numbers are as before it."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    modes = {part: part.training for part in module.modules()}
    # Of Hugging Face models: keys and values of tokens that were seen are of no use in training.
    configs: dict[int, Any] = {id(found): found for found in (getattr(m, "config", None) for m in module.modules())}
    cached = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in cached:
        config.use_cache = False
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for config in cached:
            config.use_cache = True
        for part, is_training in modes.items():
            part.training = is_training
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
