"""The profile of a step from its tape: time by operator and by kind, and how near the roofline each comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch

from weft.graph.ir.graph import Operator
from weft.graph.programs.tape_program import Timed
from weft.metrics.statistics import Summary, summarise
from weft.operators.bench import Placement, place
from weft.operators.cost import Cost
from weft.operators.roofline import Roofline

__all__ = ["KindProfile", "OperatorProfile", "Profile", "profile_of"]


@dataclass(frozen=True)
class OperatorProfile:
    """One operator of the graph. Times are medians over steps; what is not known of its cost is None."""

    name: str
    target: str  # `aten.addmm`
    role: str
    line: str  # `model.py:12`, empty where unknown
    shape: tuple[int, ...]  # of its first output
    dtype: str
    seconds: float
    cost: Cost | None
    placement: Placement | None


@dataclass(frozen=True)
class KindProfile:
    """All operators of one kind together."""

    target: str
    count: int
    seconds: float
    share: float  # of the time of all operators
    cost: Cost | None
    placement: Placement | None


@dataclass(frozen=True)
class Profile:
    """The profile of a step. `seconds` is the time of all its operators together."""

    seconds: Summary
    cost: Cost  # of those whose cost is known
    operators: tuple[OperatorProfile, ...]  # in the order in which they run
    kinds: tuple[KindProfile, ...]  # longest first
    unknown: tuple[str, ...]  # kinds whose cost is not known

    def longest(self, count: int) -> tuple[OperatorProfile, ...]:
        return tuple(sorted(self.operators, key=lambda operator: -operator.seconds)[:count])


def profile_of(records: Sequence[Timed], roofline: Roofline, *, num_warmup: int = 0) -> Profile:
    """Sum up the records of a tape.

    Args:
        records: `TapeProgram.records` after some steps.
        roofline: of the machine that ran them, by `weft.operators.measure_roofline`.
        num_warmup: steps to leave out at the beginning.
    """
    steady = [replace(record, seconds=record.seconds[num_warmup:]) for record in records]
    operators = tuple(_profiled(record, roofline) for record in steady)
    steps = [sum(step) for step in zip(*(record.seconds for record in steady), strict=True)]
    known = [operator.cost for operator in operators if operator.cost is not None]
    targets = dict.fromkeys(operator.target for operator in operators)
    total = sum(operator.seconds for operator in operators)
    kinds = [_kind([o for o in operators if o.target == target], total, roofline) for target in targets]
    return Profile(
        seconds=summarise(steps),
        cost=reduce(Cost.__add__, known, Cost(0, 0, 0)),
        operators=operators,
        kinds=tuple(sorted(kinds, key=lambda kind: -kind.seconds)),
        unknown=tuple(sorted(kind.target for kind in kinds if kind.cost is None)),
    )


def _profiled(record: Timed, roofline: Roofline) -> OperatorProfile:
    made, seconds = record.operator, summarise(record.seconds).median
    dtype = _dtype_of(made)
    placement = None if record.cost is None else _placed(record.cost, seconds, roofline, dtype)
    name = str(dtype).removeprefix("torch.")
    where = made.name, made.target, made.role, made.line
    return OperatorProfile(*where, record.shape, name, seconds, record.cost, placement)


def _kind(operators: Sequence[OperatorProfile], total: float, roofline: Roofline) -> KindProfile:
    """Placed by the mean call: the data of one call, not those of all, must fit in a memory."""
    seconds, count = sum(operator.seconds for operator in operators), len(operators)
    costs = [operator.cost for operator in operators if operator.cost is not None]
    cost = reduce(Cost.__add__, costs) if len(costs) == count else None
    placement = None
    if cost is not None:
        mean = Cost(cost.flops // count, cost.bytes_read // count, cost.bytes_written // count, cost.workspace)
        placement = _placed(mean, seconds / count, roofline, getattr(torch, operators[0].dtype))
    return KindProfile(operators[0].target, count, seconds, seconds / total if total else 0.0, cost, placement)


def _placed(cost: Cost, seconds: float, roofline: Roofline, dtype: torch.dtype) -> Placement | None:
    """None for what moves nothing, such as a view: no roof is above it."""
    return place(cost, seconds, roofline, dtype) if cost.bytes_moved and seconds > 0 else None


def _dtype_of(made: Operator) -> torch.dtype:
    """The type that the operator computes in: of its first floating-point output or input."""
    types: Iterable[torch.dtype | None] = [v.dtype for v in (*made.outputs, *made.inputs)]
    return next((dtype for dtype in types if dtype is not None and dtype.is_floating_point), torch.float32)
