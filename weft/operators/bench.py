"""Timing of operators: seconds, FLOP/s, bytes/s, and the place under this machine's roofline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.metrics.statistics import Summary
from weft.metrics.timing import TimingRule, time_callable
from weft.operators.aten_cost import count_cost
from weft.operators.cost import Cost
from weft.operators.evaluation import call
from weft.operators.operator import Operator
from weft.operators.roofline import Roofline

__all__ = ["BenchResult", "Placement", "bench_operator", "place"]


@dataclass(frozen=True)
class Placement:
    """The place of a measured call under the roofline."""

    flop_rate: float  # FLOP/s
    byte_rate: float  # B/s
    intensity: float  # FLOP/B
    memory: str  # the nearest memory that holds what the call touches
    bound: str  # "memory" or "compute": which part of the roof is above
    attainable: float  # FLOP/s, or B/s where nothing is computed
    share: float  # of the attainable


@dataclass(frozen=True)
class BenchResult:
    """One direction of one sample."""

    operator: str
    sample: int
    direction: str  # "forward" or "backward"
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    seconds: Summary
    cost: Cost | None
    placement: Placement | None  # None where the cost is not known


def bench_operator(operator: Operator, roofline: Roofline, *, max_seconds: float = 0.5) -> list[BenchResult]:
    """Time forward and backward on every sample, with torch's present threads.

    Args:
        roofline: of this machine, by `measure_roofline`.
        max_seconds: for each direction of each sample.

    Returns:
        A result for each direction of each sample.
    """
    rule = TimingRule(max_seconds=max_seconds)
    results = []
    for sample, inputs in enumerate(operator.samples(for_bench=True)):
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        for direction, function, cost in _directions(operator, inputs):
            summary = time_callable(function, name=operator.name, rule=rule).summary
            placement = None if cost is None else place(cost, summary.median, roofline, dtype)
            shapes = tuple(tuple(tensor.shape) for tensor in tensors)
            name = str(dtype).removeprefix("torch.")
            results.append(BenchResult(operator.name, sample, direction, shapes, name, summary, cost, placement))
    return results


def place(cost: Cost, seconds: float, roofline: Roofline, dtype: torch.dtype = torch.float32) -> Placement:
    """Hold a time against what the roof allows; a call that computes nothing is held against bytes a second."""
    memory = roofline.memory_of(cost.bytes_moved + cost.workspace)
    flop_rate, byte_rate = cost.flops / seconds, cost.bytes_moved / seconds
    peak = roofline.peak_of(dtype)
    if cost.flops == 0:
        rate = memory.bytes_per_second
        return Placement(0.0, byte_rate, 0.0, memory.name, "memory", rate, byte_rate / rate)
    roof = roofline.attainable(cost.intensity, memory, dtype)
    bound = "memory" if roof < peak else "compute"
    return Placement(flop_rate, byte_rate, cost.intensity, memory.name, bound, roof, flop_rate / roof)


Direction = tuple[str, Callable[[], object], Cost | None]


def _directions(operator: Operator, inputs: Sequence[Any]) -> list[Direction]:
    def forward() -> object:
        with torch.no_grad():
            return operator(*inputs)

    def forward_inside() -> object:
        with torch.no_grad():
            return operator.definition.forward(*inputs)

    found: list[Direction] = [("forward", forward, operator.cost(*inputs) or _counted(forward_inside))]
    leaves = [
        value.detach().clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for value in inputs
    ]
    wanted = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
    if operator.is_differentiable and wanted:
        outputs = [output for output in call(operator, leaves) if output.requires_grad]
        ones = [torch.ones_like(output) for output in outputs]

        def backward() -> object:
            return torch.autograd.grad(outputs, wanted, ones, retain_graph=True, allow_unused=True)

        found.append(("backward", backward, _counted(backward)))
    return found


def _counted(function: Callable[[], object]) -> Cost | None:
    """The cost of what torch sees; None where it does not see all, as in C++ and NumPy."""
    counted = count_cost(function)
    return None if counted.unknown or not counted.total.bytes_moved else counted.total
