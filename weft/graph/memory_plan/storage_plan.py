"""The storage plan: the memory of each value of a step, decided once for all steps.

    view     in the memory of the value that it is a view of
    over     in the memory of a value that nobody will read again: of an operand, or of the old state it replaces
    slot     in the arena, which the step keeps from one run to the next
    fresh    in memory that its operator allocates: it leaves the step, or the operator cannot be told where to write

A place is written over only where its last reader has run, or is the operator that writes and reads each element
before it writes it. What the caller is given is always fresh.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from weft.graph.fusion import region_of
from weft.graph.ir.graph import owner_of
from weft.graph.ir.memory_layout import fills_memory, has_known_shape, layout_of
from weft.graph.ir.side_effects import FUNCTIONAL_NORM
from weft.graph.memory_plan.aliasing import is_alias, owners_of, owns_its_outputs
from weft.graph.memory_plan.arena import Lifetime, assign_offsets
from weft.graph.memory_plan.out_variants import is_pointwise, written_into

__all__ = ["StoragePlan", "plan_storage"]

aten = torch.ops.aten

_STATISTICS = (3, 4)  # places of the running mean and variance, among its arguments and its outputs alike


@dataclass(frozen=True)
class StoragePlan:
    """Values that share memory share its name, that of the first value in it.

    Args:
        place: the first value in the memory of each value that has some of its own.
        offsets: where in the arena, by the first value.
        num_bytes: of the arena.
    """

    place: Mapping[fx.Node, fx.Node]
    offsets: Mapping[fx.Node, int]
    num_bytes: int

    def is_written(self, node: fx.Node) -> bool:
        """Whether the call writes into memory that is there already."""
        first = self.place.get(node)
        return first is not None and (first is not node or node in self.offsets)


def plan_storage(
    order: Sequence[fx.Node], replaced: Mapping[fx.Node, fx.Node], returned: Collection[fx.Node]
) -> StoragePlan:
    """Decide where each value is stored.

    Args:
        order: the nodes in the order in which they run.
        replaced: inputs that the step may write over, and what each becomes.
        returned: what the caller, or a sink, is given.
    """
    planner = _Planner(order, replaced, returned)
    for number, node in enumerate(order):
        planner.settle(number, node)
    return planner.finished()


class _Planner:
    """Goes through the calls in order, and knows what is in which memory.

    A value is known by its node, a memory by the node of the first value in it. `_last` is the number of the last call
    that reads a value, or a view of it; the number after the last call where it outlives the step.
    """

    def __init__(
        self, order: Sequence[fx.Node], replaced: Mapping[fx.Node, fx.Node], returned: Collection[fx.Node]
    ) -> None:
        self._order = order
        self._owners = owners_of(order)
        self._becomes: dict[fx.Node, list[fx.Node]] = {}
        for old, new in replaced.items():
            self._becomes.setdefault(new, []).append(old)
        self._end = len(order)
        self._numbers = {node: number for number, node in enumerate(order)}
        self._last = self._last_reads([*replaced.values(), *returned])
        self._leaving = {owner for node in returned for owner in self._owners[node]}
        self._place: dict[fx.Node, fx.Node] = {}
        self._holds: dict[fx.Node, fx.Node] = {}  # the first value in a memory -> the value in it now
        self._lifetimes: dict[fx.Node, Lifetime] = {}
        self._norms: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        for old in replaced:
            self._take(old, old)

    def settle(self, number: int, node: fx.Node) -> None:
        """Decide where the value of a call is stored."""
        if node.op != "call_function" or is_alias(node):
            return
        maker = owner_of(node)
        if not isinstance(node.meta.get("val"), Tensor) or not owns_its_outputs(maker):
            return
        if maker is not node:
            self._settle_output(number, node, maker)
            return
        if node not in self._leaving and _is_plain(node) and written_into(node) is not None:
            over = self._over(node, node) if is_pointwise(node) else self._own_state(node)
            self._write(number, node, over)
        else:
            self._take(node, node)

    def finished(self) -> StoragePlan:
        return StoragePlan(self._place, *assign_offsets(self._lifetimes))

    def _settle_output(self, number: int, node: fx.Node, maker: fx.Node) -> None:
        region = region_of(maker.target)
        if region is not None and node not in self._leaving and _is_plain(node):
            is_in_step = all(is_pointwise(inside) for inside in region.nodes.nodes if inside.op == "call_function")
            self._write(number, node, self._over(node, maker) if is_in_step else self._own_state(node))
        else:
            self._take(node, self._statistics(maker).get(node, node))

    def _statistics(self, maker: fx.Node) -> dict[fx.Node, fx.Node]:
        """The new running statistics of a batch norm, each with the old ones, if it can write over both."""
        if maker.target is not FUNCTIONAL_NORM:
            return {}
        if maker not in self._norms:
            made: dict[fx.Node, Any] = {n: maker.args[i] for n in maker.users if (i := _index(n)) in _STATISTICS}
            is_free = len(made) == len(_STATISTICS) and all(
                old in self._becomes.get(new, ()) and self._is_free(old, self._numbers[maker], readers={maker})
                for new, old in made.items()
            )
            self._norms[maker] = made if is_free else {}
        return self._norms[maker]

    def _over(self, node: fx.Node, maker: fx.Node) -> fx.Node | None:
        """The memory of an operand that the value of an element-wise call can take."""
        own = self._own_state(node)
        if own is not None:
            return own
        operands = [source for source in maker.all_input_nodes if source in self._place]
        for operand in sorted(operands, key=lambda operand: not self._leads_to_own_state(operand, node)):
            is_alike = layout_of(operand.meta["val"]) == layout_of(node.meta["val"])
            if is_alike and self._may_follow(node, maker, operand):
                return self._place[operand]
        return None

    def _own_state(self, node: fx.Node) -> fx.Node | None:
        """The old state that this value replaces, if its memory is free."""
        for old in self._becomes.get(node, ()):
            if layout_of(old.meta["val"]) != layout_of(node.meta["val"]):
                continue
            writer = owner_of(node)
            readers = {writer} if writer is not node or is_pointwise(node) else set()
            now = self._holds[old]
            if self._is_free(now, self._numbers[writer], readers=readers):
                return old
        return None

    def _leads_to_own_state(self, operand: fx.Node, node: fx.Node) -> bool:
        return self._place[operand] in self._becomes.get(node, ())

    def _may_follow(self, node: fx.Node, maker: fx.Node, operand: fx.Node) -> bool:
        first = self._place[operand]
        is_state = first in self._holds and first.op == "placeholder"
        if is_state and self._last[node] == self._end and first not in self._becomes.get(node, ()):
            return False  # it would be in the way of the state's own new value
        return self._is_free(operand, self._numbers[maker], readers={maker})

    def _is_free(self, value: fx.Node, number: int, readers: Collection[fx.Node]) -> bool:
        """Whether a value's memory may be written by call `number`, which is among the readers if it reads in step."""
        first = self._place.get(value)
        if first is None or self._holds[first] is not value or value in self._leaving:
            return False
        if self._last[value] > number or (self._last[value] == number and self._order[number] not in readers):
            return False
        # An operand that is a view of the same memory is not read in step with it.
        reader = self._order[number]
        return not any(source is not value and value in self._owners[source] for source in reader.all_input_nodes)

    def _write(self, number: int, node: fx.Node, over: fx.Node | None) -> None:
        first = node if over is None else over
        self._take(node, first)
        if over is None:
            value = node.meta["val"]
            begin = self._numbers[owner_of(node)]
            self._lifetimes[node] = Lifetime(begin, max(number, self._last[node]), value.numel() * value.element_size())
        elif over in self._lifetimes:
            lifetime = self._lifetimes[over]
            self._lifetimes[over] = Lifetime(lifetime.first, max(lifetime.last, self._last[node]), lifetime.num_bytes)

    def _take(self, node: fx.Node, first: fx.Node) -> None:
        self._place[node] = first
        self._holds[first] = node

    def _last_reads(self, outliving: Collection[fx.Node]) -> dict[fx.Node, int]:
        last = dict(self._numbers)
        for number, node in enumerate(self._order):
            for source in node.all_input_nodes:
                for owner in (source, *self._owners[source]):
                    last[owner] = max(last[owner], number)
            for owner in self._owners[node]:
                last[owner] = max(last[owner], number)
        for node in outliving:
            for owner in (node, *self._owners[node]):
                last[owner] = self._end
        return last


def _index(output: fx.Node) -> int:
    """The number of a node among the outputs of its maker."""
    index = output.args[1]
    assert isinstance(index, int)
    return index


def _is_plain(node: fx.Node) -> bool:
    """Whether the value fills its memory, on the CPU, of a size that is known: then the arena can hold it."""
    value = node.meta["val"]
    if value.device.type != "cpu" or not has_known_shape(value):
        return False
    return math.prod(value.shape) > 0 and fills_memory(value)
