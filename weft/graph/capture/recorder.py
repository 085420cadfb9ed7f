"""Recording: the operators that a function calls, as nodes of an FX graph, in the order in which they run.

A tensor is known by its cell, and a cell knows the node of its present value. Tensors that are the same memory, whole,
share a cell, so most writes in place need no node that writes:

    y = x.detach()     y shares the cell of x                  no node
    z = x.add(1)       z has a cell of its own                 add(x)
    x.mul_(2)          the cell of x, and so y, moves on       mul(x), the new value of both
    v = x.view(-1)     another look at the memory of x         view(x)
    v.mul_(2)          which a cell cannot express             mul_(v): left to PyTorch's functionalisation
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from weft.errors import GraphError
from weft.graph.capture.in_place_writes import (
    FILL_MEMORY,
    aliased_by,
    functional_variant_of,
    has_same_layout,
    is_write,
    with_defaults,
    written_by,
)
from weft.graph.capture.source_lines import quoted_line_on_stack
from weft.graph.ir.interpreter import call_plainly
from weft.graph.ir.side_effects import FUNCTIONAL_NORM, IN_PLACE_NORM, SILENT_NORM
from weft.graph.ir.symbolic_sizes import size_of
from weft.torch_private import (
    DispatchMode,
    in_backward,
    leave_compiler_alone,
    schema_of,
    snapshot,
    would_decompose,
)

__all__ = ["Annotate", "Cell", "Recorder", "lifted"]

aten = torch.ops.aten

Annotate = Callable[[fx.Node, bool], None]
"""Told of every new node, and whether autograd's backward called for it, while the call is on the stack."""

_COPY = aten.lift_fresh_copy.default
_SAME_VALUE = (aten.detach.default, aten.alias.default)
_NO_VALUE = (torch.ops.prim.device.default, aten.size.default, aten.stride.default, aten.storage_offset.default)
_NUMBERS = (bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(eq=False)
class Cell:
    """The value of a tensor, and of all that are the same memory, whole."""

    node: fx.Node
    base: "Cell | None" = None  # of a view: the cell whose memory it looks at
    is_viewed: bool = False
    is_written: bool = False

    @property
    def root(self) -> "Cell":
        return self if self.base is None else self.base


@leave_compiler_alone
class Recorder(DispatchMode):
    """Records the operators that are called while it is entered.

    Args:
        note: writes what is known of a node into its meta.
        resolve: whether to turn writes in place into new values where that can be done; else they are recorded.
        run: calls an operator.
        keep: what to note of a tensor.
        outside: gives what stands for a tensor that is neither an argument nor made here, which becomes an argument
            (`captured`); without it such a tensor is refused.
    """

    supports_higher_order_operators = True  # they come here too, to be refused

    def __init__(
        self,
        note: Annotate,
        *,
        resolve: bool = True,
        run: Callable[..., Any] = call_plainly,
        keep: Callable[[Tensor], Tensor] = snapshot,
        outside: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.captured: list[tuple[Tensor, Tensor]] = []  # from outside, with what stands for each
        self.num_unresolved = 0
        self._last: fx.Node | None = None  # placeholder
        self._cells: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._note = note
        self._resolve = resolve
        self._run = run
        self._keep = keep
        self._outside = outside
        self._let_in: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def placeholder(self, name: str, tensor: Tensor) -> Cell:
        """Let a tensor in as an argument."""
        with nullcontext() if self._last is None else self.nodes.inserting_after(self._last):
            node = self._last = self.nodes.placeholder(name)
        node.meta["val"] = self._keep(tensor)
        return self._track(tensor, Cell(node))

    def cell(self, tensor: Tensor) -> Cell:
        """The cell of a tensor.

        Raises:
            GraphError: the tensor is neither an argument nor made by an operator that was recorded.
        """
        found: Cell | None = self._cells.get(tensor)
        if found is None:
            raise GraphError(
                f"step uses a tensor that is in neither its state nor its batch ({quoted_line_on_stack()}); "
                "pass it in the state, or make it a buffer of its module"
            )
        return found

    def inside(self, value: Any) -> Any:
        """Arguments of a call with every tensor from outside replaced by what stands for it here."""
        if isinstance(value, Tensor):
            if value in self._cells or self._outside is None:
                return value
            if value not in self._let_in:
                self._let_in[value] = self._outside(value)
                self.placeholder(f"captured_{len(self.captured)}", self._let_in[value])
                self.captured.append((value, self._let_in[value]))
            return self._let_in[value]
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.inside, value))
        return {key: self.inside(part) for key, part in value.items()} if isinstance(value, dict) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._outside is not None:
            args, kwargs = self.inside(args), self.inside(kwargs)
        if func in _SAME_VALUE:
            made = snapshot(args[0])
            self._track(made, self.cell(args[0]))
            return made
        if func in _NO_VALUE:
            return self._run(func, *args, **kwargs)
        if would_decompose(func, args):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if schema_of(func) is None:
            where = quoted_line_on_stack()
            raise GraphError(f"step calls what a graph cannot hold ({func}, {where}); write it with operators")
        if func in (aten.lift_fresh.default, aten.lift.default):
            return self._constant(args[0], is_copied=func is aten.lift_fresh.default)
        if is_write(func, args):
            return self._write(func, args, kwargs)
        return self._record(func, args, kwargs)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        node = self._node(func, args, kwargs)
        made = self._run(func, *args, **kwargs)
        if isinstance(made, _NUMBERS):  # which Python goes on with, and passes on as a literal
            self.nodes.erase_node(node)
            return made
        views = [self.cell(arg).root for arg in aliased_by(func, args, kwargs)]
        for view in views:
            view.is_viewed = True
        self._bind(node, made, views[0] if views else None)
        return made

    def _constant(self, value: Tensor, *, is_copied: bool) -> Tensor:
        """Keep a tensor that `torch.tensor` made with the graph; it is copied, because the step may write to it."""
        made: Tensor = aten.lift_fresh.default(value)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value.clone() if made is value else value  # a real tensor may be written to later
        node = self.nodes.get_attr(name)
        node.meta["val"] = self._keep(made)
        if is_copied:
            node = self.nodes.create_node("call_function", _COPY, (node,), name="lift_fresh_copy")
            self._noted(node, self._keep(made))
        self._track(made, Cell(node))
        return made

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = [self.cell(tensor) for tensor in written_by(func, args, kwargs)]
        for cell in written:
            cell.root.is_written = True
        is_plain = self._resolve and not any(cell.base or cell.is_viewed for cell in written)
        twin = functional_variant_of(func) if is_plain else None
        if twin is FUNCTIONAL_NORM:
            return self._write_norm(args, written)
        given = with_defaults(func, args)
        if twin is not None and len(written) == 1 and has_same_layout(self._run(twin, *given, **kwargs), args[0]):
            node = self._node(twin, given, kwargs)
            node.meta["fills_memory"] = func is FILL_MEMORY
            made = self._run(func, *args, **kwargs)
            self._noted(node, self._keep(made))
            written[0].node = node
            self._track(made, written[0])
            return made
        return self._write_as_it_is(IN_PLACE_NORM if func is SILENT_NORM else func, args, kwargs)

    def _write_norm(self, args: Any, statistics: list[Cell]) -> Any:
        """Batch norm, with the running statistics as further outputs."""
        node = self._node(FUNCTIONAL_NORM, args, {})
        made = self._run(SILENT_NORM, *args)
        values = (*made, args[3], args[4])
        self._bind(node, values, None, statistics)
        return made

    def _write_as_it_is(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.num_unresolved += 1
        node = self._node(func, args, kwargs)
        node.meta["fills_memory"] = func is FILL_MEMORY
        made = self._run(func, *args, **kwargs)
        written = list(written_by(func, args, kwargs))
        if isinstance(made, Tensor) and any(made is tensor for tensor in written):
            self._noted(node, self._keep(made))
            self.cell(made).node = node
        else:
            self._bind(node, made, None)
        return made

    def _node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        recorded = tuple(map(self._recorded, args)), {key: self._recorded(value) for key, value in kwargs.items()}
        return self.nodes.create_node("call_function", func, *recorded, name=func._schema.name.partition("::")[2])

    def _recorded(self, value: Any) -> Any:
        """An argument as a node holds it."""
        if isinstance(value, Tensor):
            return self.cell(value).node
        if isinstance(value, (tuple, list)):
            parts = list(map(self._recorded, value))
            return tuple(parts) if type(value) is tuple else parts
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return size_of(value)
        return value

    def _bind(self, node: fx.Node, made: Any, base: Cell | None, known: Sequence[Cell] = ()) -> None:
        """Give the results of an operator their cells; the last of several may be the values of known cells."""
        if isinstance(made, Tensor):
            self._noted(node, self._keep(made))
            self._track(made, Cell(node, base))
        elif isinstance(made, (tuple, list)):
            values = [self._keep(part) if isinstance(part, Tensor) else part for part in made]
            self._noted(node, values)
            for i, part in enumerate(made):
                if isinstance(part, Tensor):
                    item = self.nodes.create_node("call_function", operator.getitem, (node, i), name="getitem")
                    self._noted(item, values[i])
                    place = i - len(made) + len(known)
                    if place >= 0:
                        known[place].node = item
                    else:
                        self._track(part, Cell(item, base))
        else:
            self._noted(node, made)

    def _noted(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        self._note(node, in_backward())

    def _track(self, tensor: Tensor, cell: Cell) -> Cell:
        self._cells[tensor] = cell
        return cell


def lifted(constants: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """Constants of another graph, which a recorder that is at work keeps as its own."""
    return lambda name: aten.lift.default(constants[name])
