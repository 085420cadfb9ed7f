"""Straight-line Python from a graph and its memory plan: a function that makes the step, once for each state.

def bind(kept, memory, constants):      tensors that stay, the arena
    weight_t = torch.t(weight)          what depends on them alone: views, places in the arena
    def step(inputs, sink):
        torch.mm(x, weight_t, out=mm)   what is left: one call an operator
"""

import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import Tensor, fx

from weft.graph.fusion import Region, region_of
from weft.graph.ir.graph import Graph, outputs_of, owner_of
from weft.graph.ir.interpreter import MINDS_GRAD_MODE
from weft.graph.ir.side_effects import FUNCTIONAL_NORM, IN_PLACE_NORM
from weft.graph.ir.source_text import HEADER, argument_text, line_of_node, name_of, variable_names
from weft.graph.memory_plan.aliasing import is_alias, owners_of, owns_its_outputs
from weft.graph.memory_plan.direct_calls import direct_call
from weft.graph.memory_plan.out_variants import OperatorCall, written_into
from weft.graph.memory_plan.signature import BoundSignature
from weft.graph.memory_plan.storage_plan import StoragePlan

__all__ = ["source_of"]

_RESERVED = {"bare", "below_autograd", "bind", "compiled", "constants", "copy", "inputs", "is_finite", "kept", "memory"}
_RESERVED |= {"own", "results", "sink", "staged", "step", "torch", "_"}


def source_of(graph: Graph, bound: BoundSignature, order: Sequence[fx.Node], storage: StoragePlan) -> str:
    """The text of a module with `bind(kept, memory, constants)`, which gives `step(inputs, sink)`.

    The module is to be given `own(tensor)`, which copies what others hold, `copy(tensor)`, `is_finite(tensor)`,
    `bare(operator)`, `below_autograd(operator)` and `compiled(region, into)`.
    """
    writer = _Writer(graph, bound, order, storage)
    writer.write()
    lines = [f"{alias} = {function}" for alias, function in sorted(writer.aliases.items())]
    kept = [writer.name(node) for i, node in enumerate(graph.placeholders) if i in bound.kept]
    lines += ["", "", "def bind(kept, memory, constants):", f"    [{', '.join(kept)}] = kept"]
    lines += [f"    {line}" for line in writer.once]
    lines += [
        "",
        "    def step(inputs, sink):",
        *(f"        {line}" for line in writer.each),
        "",
        "    return step",
        "",
    ]
    return "\n".join([HEADER, *lines])


class _Writer:
    """Writes what is done once, and what is done in each step."""

    def __init__(self, graph: Graph, bound: BoundSignature, order: Sequence[fx.Node], storage: StoragePlan) -> None:
        self._graph, self._bound, self._order, self._storage = graph, bound, order, storage
        self._names = variable_names(order, _RESERVED)
        self._owners = owners_of(order)
        self._static: set[str] = set()  # names that are bound before the step
        self._readers = self._last_readers()
        self._direct: dict[Hashable, str | None] = {}
        self.aliases: dict[str, str] = {}
        self.once: list[str] = []
        self.each: list[str] = []

    def name(self, node: fx.Node) -> str:
        """The variable that holds a value: that of the memory which it is in."""
        return self._names[self._storage.place.get(node, node)]

    def write(self) -> None:
        inputs = self._graph.placeholders
        self._static = {self.name(inputs[i]) for i in self._bound.kept}
        given = [self.name(node) for i, node in enumerate(inputs) if i not in self._bound.kept]
        self.each.append(f"[{', '.join(given)}] = inputs")
        self._reserve_memory()
        roles = {made.node: made.role for made in self._graph.operators}
        part = ""
        for number, node in enumerate(self._order):
            before = len(self.each)
            if node.op == "get_attr":
                self.once.append(f"{self.name(node)} = constants[{node.target!r}]")
                self._static.add(self.name(node))
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._call(node)
            if len(self.each) > before and roles.get(node, part) != part:
                part = roles[node]
                self.each.insert(before, f"# {part}")
            self._after(number, node)
        self._close()

    def _reserve_memory(self) -> None:
        for node, offset in self._storage.offsets.items():
            value = node.meta["val"]
            shape, stride = list(value.shape), list(value.stride())
            self.once.append(f"{self.name(node)} = memory({offset}, {shape}, {stride}, {value.dtype})")
            self._static.add(self.name(node))

    def _call(self, node: fx.Node) -> None:
        region = region_of(node.target)
        if region is not None:
            self._call_region(node, region)
            return
        line = line_of_node(node)
        if self._storage.is_written(node):
            call = written_into(node)
            assert call is not None
            is_same = self.name(node) == node.name
            where = " ".join(filter(None, ("" if is_same else f"{node.name}:", line)))
            self.each.append(f"{self._text(node, call)}{f'  # {where}' if where else ''}")
            return
        text = f"{self._targets(node)} = {self._text(node, self._plain_call(node))}{f'  # {line}' if line else ''}"
        if is_alias(node) and all(self.name(source) in self._static for source in node.all_input_nodes):
            self.once.append(text)
            self._static.update(self.name(made) for made in (node, *outputs_of(node)))
        else:
            self.each.append(text)
            if "_" in self._targets(node).strip("[]").split(", "):
                self.each.append("del _")

    def _plain_call(self, node: fx.Node) -> OperatorCall:
        """The call as captured; batch norm is told to write over its statistics where the plan says so."""
        statistics = [output for output in outputs_of(node) if self._storage.is_written(output)]
        if node.target is FUNCTIONAL_NORM and len(statistics) == 2:
            return IN_PLACE_NORM, tuple(node.args), dict(node.kwargs)
        return node.target, tuple(node.args), dict(node.kwargs)

    def _targets(self, node: fx.Node) -> str:
        """The left side of an assignment: one name, or a name for each output that is used."""
        if not isinstance(node.meta.get("val"), (tuple, list)):
            return self.name(node)
        outputs = {output.args[1]: self.name(output) for output in outputs_of(node)}
        count = len(node.meta["val"])
        if self._plain_call(node)[0] is IN_PLACE_NORM:
            count = 3
        return f"[{', '.join(outputs.get(i, '_') for i in range(count))}]"

    def _call_region(self, node: fx.Node, region: Region) -> None:
        given, fresh, into = [self.name(source) for source in node.args[0]], [], {}  # type: ignore[union-attr,arg-type]
        outputs = {output.args[1]: output for output in outputs_of(node)}
        for i in range(len(node.meta["val"])):
            output = outputs.get(i)
            if output is not None and self._storage.is_written(output):
                name = self.name(output)
                if name not in given:
                    given.append(name)
                into[i] = given.index(name)
            else:
                fresh.append("_" if output is None else self.name(output))
        alias, compiled = f"region_{region.name}", f"compiled({region.name!r}, {into})"
        while self.aliases.setdefault(alias, compiled) != compiled:  # equal regions may write to other places
            alias += "_"
        left = f"[{', '.join(fresh)}] = " if fresh else ""
        self.each.append(f"{left}{alias}([{', '.join(given)}])")

    def _text(self, node: fx.Node, call: OperatorCall) -> str:
        _, args, kwargs = call
        return f"{self._function(node, call)}({argument_text(args, kwargs, self.name)})"

    def _function(self, node: fx.Node, call: OperatorCall) -> str:
        target, args, kwargs = call
        alias = name_of(target).replace(".", "_")
        if str(target) in MINDS_GRAD_MODE and node.meta.get("in_grad_mode", False):
            self.aliases[alias := f"{alias}_for_backward"] = f"below_autograd(torch.ops.{target})"
            return alias
        values = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
        form = target, _form_of(values)
        if form not in self._direct:
            self._direct[form] = direct_call(target, *values)
        direct = self._direct[form]
        if direct is None:
            self.aliases[alias] = f"bare(torch.ops.{target})"
        return direct or alias

    def _after(self, number: int, node: fx.Node) -> None:
        """Write what follows a call: values handed over, values freed, and the way out if the guard is not finite."""
        for name in self._bound.sunk.get(node, ()):
            self.each.append(f"sink({name!r}, {self._given_away(node, name)})")
        if node is self._bound.guard:
            there = set(self._order[: number + 1])
            results = [self._result(place, there) for place in range(len(self._bound.returned))]
            self.each.append(f"if not is_finite({self.name(node)}):")
            self.each.append(f"    return [{', '.join(results)}]")
        done = [name for name in self._readers.pop(number, ()) if name not in self._static]
        if done:
            self.each.append(f"del {', '.join(done)}")

    def _given_away(self, node: fx.Node, name: str) -> str:
        """The value itself where nobody else will have it, else a copy."""
        names = self._bound.sunk[node]
        is_last = name == names[-1] and node not in self._bound.returned
        is_read = any(user.op != "output" for user in node.users) or node.op != "call_function"
        if not is_last or is_read:
            return f"copy({self.name(node)})"
        is_sole = self._owners[node] == frozenset([node]) and owns_its_outputs(owner_of(node))
        return self.name(node) if is_sole else f"own({self.name(node)})"

    def _close(self) -> None:
        """New state that is not in its place yet is copied there, but for what was to be returned as it was."""
        left = [(old, new) for old, new in self._bound.replaced.items() if self.name(old) != self.name(new)]
        changing = {old for old, _ in left}
        results = f"[{', '.join(map(self._result, range(len(self._bound.returned))))}]"
        if not left:
            self.each.append(f"return {results}")
            return
        self.each.append(f"results = {results}")
        staged = [new for _, new in left if self._owners[new] & changing]
        if staged:
            self.each.append(f"staged = [{', '.join(f'copy({self.name(new)})' for new in staged)}]")
        for old, new in left:
            value = f"staged[{staged.index(new)}]" if new in staged else self.name(new)
            self.each.append(f"{self.name(old)}.copy_({value})")
        self.each.append("return results")

    def _result(self, place: int, there: Collection[fx.Node] | None = None) -> str:
        """One result as text; one that is not there yet is None. Old state that is shown is copied before it goes."""
        node = self._bound.in_place.get(place)
        if node is not None:
            return self.name(node)
        node = self._bound.returned[place]
        if node is None or (there is not None and node not in there):
            return "None"
        is_state = self._owners[node] & self._bound.replaced.keys()
        return f"copy({self.name(node)})" if is_state else self.name(node)

    def _last_readers(self) -> dict[int, list[str]]:
        """The variables of the step that are mentioned for the last time by each call."""
        last: dict[str, int] = {}
        for number, node in enumerate(self._order):
            for value in (node, *node.all_input_nodes):
                if value.op == "call_function" and isinstance(value.meta.get("val"), Tensor):
                    last[self.name(value)] = number
        returned = (node for node in self._bound.returned if node is not None)
        for node in (*self._graph.placeholders, *returned, *self._bound.replaced.values()):
            last.pop(self.name(node), None)
        found: dict[int, list[str]] = {}
        for name, number in last.items():
            found.setdefault(number, []).append(name)
        return found


def _form_of(value: Any) -> Hashable:
    """The kinds of arguments, without their shapes, by which a function of torch may choose its operator."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    if isinstance(value, dict):
        return tuple((key, _form_of(item)) for key, item in value.items())
    return type(value).__name__
