"""The traces of a script's first steps, in one process and on ranks, compared: pure functions of tensors.

    gradients      of the first step, as the optimizer got them: an error of scale shows there and nowhere else
    parameters     after every step; of all ranks to the last bit the same

An optimizer that divides by a gradient's size, as Adam does, makes a whole step of what is rounding in a gradient that
should be nothing. Elements whose gradient was ever below a thousandth of the step's largest are therefore held to their
gradients alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from weft.distributed.script.observation.tracing import Facts
from weft.graph import relative_error
from weft.proving.proof import Proof, Trace, failed, unpack_trace

__all__ = ["ScriptTrace", "compare_script", "read_script_traces"]

GRADIENT = "gradient "
ROUNDING = 1e-3
"""Of a step's largest gradient: an element below that may be rounding for the most part."""
LEAST = 1e-2
"""Of a model's largest parameter, or gradient: an error is told as a share of this, where a tensor's own largest value
is less."""


@dataclass(frozen=True)
class ScriptTrace:
    """One rank. `steps[0]` is before the first update; `first` is its own gradient of the first backward."""

    steps: Trace
    first: dict[str, Tensor]
    facts: Facts

    @property
    def num_steps(self) -> int:
        return len(self.steps) - 1


def read_script_traces(folder: Path, num_ranks: int) -> list[ScriptTrace]:
    """Those that the ranks left in a folder."""
    traces = []
    for rank in range(num_ranks):
        tensors = load_file(folder / f"rank-{rank}.safetensors")
        facts = Facts(**json.loads((folder / f"rank-{rank}.json").read_text()))
        first = {name.removeprefix("first/"): tensor for name, tensor in tensors.items() if name.startswith("first/")}
        traces.append(ScriptTrace(unpack_trace(tensors), first, facts))
    return traces


def compare_script(
    ranks: Sequence[ScriptTrace], reference: ScriptTrace, tolerance: float, *, has_gradients: bool = True
) -> Proof:
    """Every rank against one process, step by step.

    Args:
        has_gradients: whether ranks have the gradients of all before they update, as servers' ranks have not.
    """
    num_steps, found, is_bitwise = reference.num_steps, ranks[0], True
    for rank, trace in enumerate(ranks):
        if trace.num_steps != num_steps:
            counts = f"rank {rank}: {trace.num_steps}, one process: {num_steps}"
            return failed(f"ranks took another number of steps than one process ({counts})", num_steps, tolerance)
    floor, settled = LEAST * _largest(_parameters(reference.steps[0])), dict[str, Tensor]()
    largest = 0.0
    for step in range(num_steps + 1):
        apart = _first_apart([_parameters(trace.steps[step]) for trace in ranks])
        if apart:
            return failed(f"ranks differ {_when(step)}: {apart}", num_steps, tolerance)
        settled = _settle(settled, reference.steps[step])
        for name, expected in _expected(reference.steps[step], is_first=step == 1 and has_gradients).items():
            is_gradient = name.startswith(GRADIENT)
            own = found.steps[step].get(name, torch.zeros_like(expected))
            error, place = _error(
                own,
                expected,
                settled.get(name),
                LEAST * _largest(_gradients(reference.steps[step])) if is_gradient else floor,
            )
            largest, is_bitwise = max(largest, error), is_bitwise and (is_gradient or torch.equal(own, expected))
            if not error <= tolerance:
                limit = f"allowed: {tolerance:.3g}, for rounding"
                what = f"{_when(step)}, {name}{place} of the ranks is off by {error:.3g} of its largest value ({limit})"
                return failed(what, num_steps, tolerance, error)
    how = "to the last bit" if is_bitwise else f"to {largest:.2g} of each tensor's largest value"
    finding = f"{len(ranks)} ranks gave the parameters of one process after each of {num_steps} steps, {how}"
    return Proof(True, is_bitwise, num_steps, largest, tolerance, finding)


def _when(step: int) -> str:
    return f"after step {step}" if step else "before the first step"


def _parameters(step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in step.items() if not name.startswith(GRADIENT)}


def _gradients(step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in step.items() if name.startswith(GRADIENT)}


def _expected(step: Mapping[str, Tensor], *, is_first: bool) -> dict[str, Tensor]:
    """Gradients before parameters, which they made."""
    return (_gradients(step) if is_first else {}) | _parameters(step)


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def _settle(settled: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By parameter, the elements whose gradients have all been more than rounding."""
    floor, found = ROUNDING * _largest(_gradients(step)), dict(settled)
    for name, gradient in _gradients(step).items():
        is_clear = gradient.abs() >= floor
        parameter = name.removeprefix(GRADIENT)
        found[parameter] = found[parameter] & is_clear if parameter in found else is_clear
    return found


def _error(found: Tensor, expected: Tensor, settled: Tensor | None, floor: float) -> tuple[float, str]:
    if not bool(expected.isfinite().all()):
        return float("inf"), ""
    if settled is not None and found.shape == expected.shape:
        found = torch.where(settled, found, expected)
    return relative_error(found, expected, floor)


def _first_apart(ranks: Sequence[Mapping[str, Tensor]]) -> str:
    for rank, found in enumerate(ranks):
        for name, tensor in ranks[0].items():
            if not torch.equal(found[name], tensor):
                error, place = relative_error(found[name], tensor)
                return f"{name}{place} of rank {rank} is off from that of rank 0 by {error:.3g} of its largest value"
    return ""
