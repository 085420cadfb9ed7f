"""A model cut into stages that take as long as each other: the slowest of them is the pace of a pipeline.

model, batch -> calls of blocks and layers -> units with costs -> places of cuts -> modules of stages
                partition_record, _trace      partition_units    partition_cuts   partition_build
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.distributed.group.group import AbstractGroup
from weft.distributed.placement.pipeline.partition_blocks import find_blocks
from weft.distributed.placement.pipeline.partition_build import build_stages
from weft.distributed.placement.pipeline.partition_calls import Call, Capture, map_structure, prune, run_call, values_of
from weft.distributed.placement.pipeline.partition_cuts import best_cuts
from weft.distributed.placement.pipeline.partition_record import Inputs, record, run_on, tensors_of
from weft.distributed.placement.pipeline.partition_trace import trace
from weft.distributed.placement.pipeline.partition_units import Unit, find_units, measure, use_untouched
from weft.distributed.placement.pipeline.stages import INPUT, Partition
from weft.errors import GraphError, PlanError

__all__ = ["Costs", "partition", "units_of"]

Costs = Literal["time", "flops", "parameters"] | Sequence[float] | Callable[[Unit], float]
"""Of units: measured seconds, counted operations, bytes of parameters, or numbers that are given."""

_STATES = 4  # a weight, its gradient and two slots of an optimizer


def partition(
    module: nn.Module,
    sample_inputs: Inputs | None,
    num_stages: int,
    costs: Costs | None = None,
    *,
    speeds: Sequence[float] | None = None,
    memory: float | None = None,
    kept: Sequence[int] | None = None,
    group: AbstractGroup | None = None,
    firsts: Sequence[int] | None = None,
) -> Partition:
    """The model as stages that share its modules.

    Args:
        module: keeps its mode, statistics and random numbers, though it may be run.
        sample_inputs: of a batch (or micro-batch), by position or by name. None for a model that torch.fx can trace.
        costs: by default operations, or parameters where there are no inputs.
        speeds: of the stages, relative to each other; by default equal.
        memory: bytes that a stage may take, for weights, gradients, two slots of an optimizer, and the activations of
            as many batches as are kept there.
        kept: how many these are in each stage; by default as many as 1F1B keeps.
        group: ranks that all call this with the same model, of which rank 0 decides, as measured times differ: it
            measures, and the others wait.
        firsts: where a partition of the same model was cut, to cut it there again, whatever anything costs.

    Raises:
        GraphError: the forward pass cannot be cut, and why.
        PlanError: there are more stages than units, a stage would have no parameters, no cut fits the memory, or the
            model was never cut at these places.
    """
    if speeds is not None and (len(speeds) != num_stages or min(speeds) <= 0):
        raise PlanError(f"every stage has its speed, above zero (stages: {num_stages}, speeds: {list(speeds)})")
    blocks = find_blocks(module, num_stages)
    with use_untouched(module):
        capture = _capture(module, sample_inputs, blocks)
        units = find_units(capture, module)
        _check_number(units, num_stages)
        if firsts is None:
            measured = costs if group is None or group.rank == 0 or costs != "time" else "parameters"
            units = _with_costs(units, capture, module, sample_inputs, measured, has_memory=memory is not None)
    if firsts is None:
        cuts = _decide(units, capture, speeds or [1.0] * num_stages, memory, kept or range(num_stages, 0, -1))
    else:
        cuts = _places(firsts, units, num_stages)
    if group is not None:
        cuts = _agree(cuts, num_stages, group)
    if cuts is None:
        raise _no_cut(units, num_stages, memory)
    places = (0, *cuts, len(units))
    stages = [[call for unit in units[begin:end] for call in unit.calls] for begin, end in pairwise(places)]
    layers = tuple(tuple(unit.name for unit in units[begin:end]) for begin, end in pairwise(places))
    return replace(build_stages(capture, module, stages), firsts=places[:-1], layers=layers)


def units_of(
    module: nn.Module, sample_inputs: Inputs | None, num_stages: int, costs: Costs | None = None
) -> list[Unit]:
    """The units of a model and their costs, in their order: between which it can be cut."""
    with use_untouched(module):
        capture = _capture(module, sample_inputs, find_blocks(module, num_stages))
        return _with_costs(find_units(capture, module), capture, module, sample_inputs, costs)


def _capture(module: nn.Module, inputs: Inputs | None, blocks: Mapping[str, nn.Module]) -> Capture:
    """In both modes, as a forward pass may look at its own: `F.dropout(x, training=self.training)`."""
    found: list[Capture] = []
    for is_training in (True, False):
        module.train(is_training)
        found.append(prune(trace(module, blocks) if inputs is None else record(module, inputs, blocks)))
    capture = _merge(*found)
    if inputs is not None:
        _check_other_batch(capture, module, inputs)
    module.train()
    return capture


def _merge(training: Capture, evaluation: Capture) -> Capture:
    ours, theirs = training.calls, evaluation.calls
    for call, other in zip(ours, theirs, strict=False):
        if (call.name, call.outputs) != (other.name, other.outputs):
            raise _differs(call.name, other.name)
    if len(ours) != len(theirs):
        raise _differs(f"{len(ours)} calls", f"{len(theirs)} calls")
    rows = zip(ours, theirs, strict=True)
    calls = [call if _same(call, other) else replace(call, in_evaluation=other.arguments) for call, other in rows]
    return replace(training, calls=tuple(calls))


def _differs(training: str, evaluation: str) -> GraphError:
    what = f"training: {training}, evaluation: {evaluation}"
    return GraphError(f"forward takes other steps in evaluation ({what}); let a block decide by its mode")


def _same(call: Call, other: Call) -> bool:
    def as_text(leaf: Any) -> str:
        return f"tensor of {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)

    return bool(map_structure(as_text, call.arguments) == map_structure(as_text, other.arguments))


@torch.no_grad()
def _check_other_batch(capture: Capture, module: nn.Module, inputs: Inputs) -> None:
    """Half of the batch through the calls gives what the model gives: sizes are not those of the sample."""
    tensors = tensors_of(inputs)
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) != 1 or max(sizes) < 2:
        return
    half = max(sizes) // 2
    fewer = {k: v[:half] for k, v in inputs.items()} if isinstance(inputs, Mapping) else tuple(t[:half] for t in inputs)
    expected = [leaf for leaf in pytree.tree_leaves(run_on(module, fewer)) if isinstance(leaf, Tensor)]
    known: dict[str, Any] = {f"{INPUT}{number}": tensor for number, tensor in enumerate(tensors_of(fewer))}
    for call in capture.calls:
        known |= zip(call.outputs, run_call(call, module, known), strict=True)
    found = [known[value] for value in values_of(capture.output)]
    for one, other in zip(found, expected, strict=False):
        if one.shape != other.shape or not torch.allclose(one, other, equal_nan=True):
            what = f"batch of {max(sizes)}, then of {half}"
            raise GraphError(f"forward has sizes in it that a cut cannot follow ({what}); compute them inside a block")


def _with_costs(
    units: list[Unit],
    capture: Capture,
    module: nn.Module,
    inputs: Inputs | None,
    costs: Costs | None,
    *,
    has_memory: bool = False,
) -> list[Unit]:
    """The units with their costs, and with their activations where these count."""
    if costs is None:
        costs = "parameters" if inputs is None else "flops"
    if costs in ("time", "flops"):
        if inputs is None:
            raise PlanError(f"nothing can be measured without a batch (costs: {costs}); give sample inputs")
        return measure(units, capture, module, tensors_of(inputs), by_time=costs == "time")
    given = _given_costs(units, costs)
    if has_memory and inputs is not None:
        units = measure(units, capture, module, tensors_of(inputs), by_time=False)
    return [replace(unit, cost=cost) for unit, cost in zip(units, given, strict=True)]


def _given_costs(units: Sequence[Unit], costs: Costs) -> Sequence[float]:
    if isinstance(costs, str):
        return [unit.cost for unit in units]  # of parameters, until something else is known
    if callable(costs):
        return [costs(unit) for unit in units]
    if len(costs) != len(units):
        raise PlanError(f"every unit has its cost (units: {len(units)}, costs: {len(costs)}); see units_of")
    return costs


def _decide(
    units: Sequence[Unit], capture: Capture, speeds: Sequence[float], memory: float | None, kept: Sequence[int]
) -> tuple[int, ...] | None:

    def fits(stage: int, begin: int, end: int) -> bool:
        own = units[begin:end]
        if not any(unit.parameters for unit in own):
            return False
        weights, activations = sum(unit.num_bytes for unit in own), sum(unit.activations for unit in own)
        return memory is None or _STATES * weights + kept[stage] * activations <= memory

    return best_cuts([unit.cost for unit in units], speeds, _carried(units, capture), fits)


def _places(firsts: Sequence[int], units: Sequence[Unit], num_stages: int) -> tuple[int, ...]:
    is_ascending = all(one < other for one, other in pairwise((*firsts, len(units))))
    if len(firsts) != num_stages or firsts[0] != 0 or not is_ascending:
        what = f"first units: {list(firsts)}, stages: {num_stages}, units: {len(units)}"
        raise PlanError(f"model was not cut at these places ({what}); replay a run of this model")
    return tuple(firsts[1:])


def _carried(units: Sequence[Unit], capture: Capture) -> list[float]:
    """Bytes of the values that are made before each unit and used by it or later; 1 for one of unknown size."""
    made = {value: number for number, unit in enumerate(units) for call in unit.calls for value in call.outputs}
    used = dict.fromkeys(made, -1)
    for number, unit in enumerate(units):
        for value in values_of([(call.arguments, call.in_evaluation) for call in unit.calls]):
            if value in used:
                used[value] = number
    used |= {value: len(units) - 1 for value in values_of(capture.output) if value in used}
    return [
        float(sum(capture.num_bytes.get(value, 1) for value in made if made[value] < place <= used[value]))
        for place in range(len(units))
    ]


def _agree(cuts: tuple[int, ...] | None, num_stages: int, group: AbstractGroup) -> tuple[int, ...] | None:
    """As rank 0 decided."""
    numbers = torch.tensor(cuts or [0] * (num_stages - 1), dtype=torch.int64)
    if num_stages > 1:
        group.broadcast(numbers)
    found = tuple(int(number) for number in numbers)
    return found if num_stages == 1 or any(found) else None


def _check_number(units: Sequence[Unit], num_stages: int) -> None:
    if num_stages > len(units):
        what = f"stages: {num_stages}, units: {len(units)}"
        raise PlanError(f"more stages than units between which the model can be cut ({what}); use fewer stages")


def _no_cut(units: Sequence[Unit], num_stages: int, memory: float | None) -> PlanError:
    num_with = sum(bool(unit.parameters) for unit in units)
    if num_with < num_stages:
        stage = next(number for number, unit in enumerate(units) if not unit.parameters)
        what = f"stage {min(stage, num_stages - 1)}: {units[stage].name}"
        return PlanError(f"stage has no parameters ({what}); use pipeline={max(1, num_with)}")
    return PlanError(f"no cut fits the memory of a stage (stages: {num_stages}, bytes: {memory:.3g}); use more stages")
