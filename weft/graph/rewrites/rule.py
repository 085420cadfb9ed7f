"""Rules: edits of an FX graph that keep what it computes, to the bit or but for rounding.

Most are made of a pattern and its replacement, which is put in the place of a node where it fits: same shape, strides
and type, and no memory shared anew.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from weft.graph.ir.interpreter import runner_of
from weft.graph.ir.memory_layout import escaping, is_view, layout_of
from weft.graph.ir.symbolic_sizes import resolved, sizes_by_name
from weft.graph.rewrites.pattern import AbstractPattern, Anything, Call, Found, Number, Var, find
from weft.graph.rewrites.price import price_of_call, price_of_node
from weft.torch_private import schema_of

__all__ = ["Edit", "Replacement", "Rule", "instantiate", "pattern_rule", "replace_with"]

Edit = Callable[[fx.Graph, dict[str, Tensor]], int]
"""Edits nodes and constants in place; returns how many changes it made, 0 where there is nothing left to do."""


@dataclass(frozen=True)
class Rule:
    """An edit with a name. An exact one keeps every bit, but for the sign and payload of a NaN."""

    name: str
    edit: Edit
    is_exact: bool = True


Replacement = AbstractPattern | Callable[[Found], AbstractPattern | None]
"""The pattern that is to stand there; or a function of what the names stand for, which may refuse by None."""


@dataclass(frozen=True, eq=False)
class NewCall:
    """A call that is not in the graph yet, and what it would make."""

    target: Any
    args: tuple[Any, ...]  # nodes, literals, lists of them, and NewCall
    options: dict[str, Any]
    value: Any

    @property
    def price(self) -> float:
        """Of this call and those that it needs, each once."""
        calls, waiting = set[NewCall](), [self]
        while waiting:
            call = waiting.pop()
            if call not in calls:
                calls.add(call)
                waiting += [part for part in (*call.args, *call.options.values()) if isinstance(part, NewCall)]
        return sum(price_of_call(c.target, _values(c.args), _values(c.options), c.value) for c in calls)


def pattern_rule(
    name: str,
    pattern: Call,
    replacement: Replacement,
    *,
    is_exact: bool = True,
    is_cheaper: bool = False,
) -> Rule:
    """A rule that puts the replacement wherever the pattern fits.

    Args:
        replacement: a pattern of the same names, or a function from their values to one, or to None to refuse.
        is_exact: whether every bit stays as it was.
        is_cheaper: only where the price of what comes is below that of what goes.
    """

    def edit(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
        count, leaving = 0, escaping(nodes)
        for target in pattern.targets:
            for node in nodes.find_nodes(op="call_function", target=target):
                new = _replacement_for(node, pattern, replacement, leaving, is_cheaper) if node.users else None
                if new is not None:
                    replace_with(nodes, node, new)
                    leaving = escaping(nodes) if node in leaving else leaving
                    nodes.erase_node(node)
                    count += 1
        return count

    return Rule(name, edit, is_exact)


def _replacement_for(
    node: fx.Node, pattern: Call, replacement: Replacement, leaving: set[fx.Node], is_cheaper: bool
) -> fx.Node | NewCall | None:
    for found, calls in find(pattern, node):
        template = replacement if isinstance(replacement, AbstractPattern) else replacement(found)
        new = None if template is None else instantiate(template, found, node)
        if new is None or not _fits(node, new, leaving):
            continue
        if is_cheaper and _price(new) >= sum(map(price_of_node, _dying(calls))):
            continue
        assert isinstance(new, (fx.Node, NewCall))
        return new
    return None


def instantiate(template: Any, found: Found, like: fx.Node) -> Any:
    """A template with its names filled in, and the shape of every call; None where a call is not possible."""
    mode = like.meta["val"].fake_mode
    with mode:
        try:
            placeholders = like.graph.find_nodes(op="placeholder") if mode.shape_env else []
            sizes = sizes_by_name([node.meta["val"] for node in placeholders])
            return _instantiate(template, found, _Instantiation(runner_of(mode), sizes))
        except (RuntimeError, ValueError):  # a view that memory does not allow, a size that would have to be settled
            return None


def replace_with(nodes: fx.Graph, node: fx.Node, new: fx.Node | NewCall) -> fx.Node:
    """Let all who read a node read something else; calls that are missing are made in front of it."""
    with nodes.inserting_before(node):
        made = _make(nodes, new, node, {})
    node.replace_all_uses_with(made)
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Instantiation:
    """A way to run calls without values, the values of named sizes, and the calls made so far, by identity."""

    run: Callable[..., Any]
    sizes: Mapping[str, Any]
    made: dict[int, NewCall] = field(default_factory=dict)


def _instantiate(template: Any, found: Found, by: _Instantiation) -> Any:
    if isinstance(template, (Var, Number, Anything)):
        return found[template.name]
    if isinstance(template, (tuple, list)):
        return type(template)(_instantiate(item, found, by) for item in template)
    if not isinstance(template, Call):
        return template
    if id(template) not in by.made:  # one that occurs twice is made once
        args = tuple(_instantiate(item, found, by) for item in template.args)
        options = {key: _instantiate(item, found, by) for key, item in template.options.items()}
        values, named = resolved((_values(args), _values(options)), by.sizes)
        made = by.run(template.targets[0], *values, **named)
        by.made[id(template)] = NewCall(template.targets[0], args, options, made)
    return by.made[id(template)]


def _values(part: Any) -> Any:
    def value_of(item: Any) -> Any:
        return item.value if isinstance(item, NewCall) else item.meta["val"] if isinstance(item, fx.Node) else item

    return fx.node.map_aggregate(part, value_of)


def _make(nodes: fx.Graph, part: Any, like: fx.Node, made: dict[NewCall, fx.Node]) -> Any:
    if isinstance(part, (tuple, list)):
        return type(part)(_make(nodes, item, like, made) for item in part)
    if not isinstance(part, NewCall):
        return part
    if part not in made:
        args = tuple(_make(nodes, item, like, made) for item in part.args)
        options = {key: _make(nodes, item, like, made) for key, item in part.options.items()}
        made[part] = nodes.call_function(part.target, args, options)
        made[part].meta = {**like.meta, "val": part.value}
    return made[part]


def _fits(node: fx.Node, new: fx.Node | NewCall, leaving: set[fx.Node]) -> bool:
    value = new.value if isinstance(new, NewCall) else new.meta["val"]
    if not isinstance(value, Tensor) or layout_of(value) != layout_of(node.meta["val"]):
        return False
    shares_memory = isinstance(new, fx.Node) or any(a.alias_info is not None for a in schema_of(new.target).returns)
    return is_view(node) or not shares_memory or node not in leaving


def _dying(calls: tuple[fx.Node, ...]) -> Iterator[fx.Node]:
    """Of matched calls, root first, those that nobody reads once the root is gone."""
    gone: set[fx.Node] = set()
    for call in calls:
        if call is calls[0] or set(call.users) <= gone:
            gone.add(call)
            yield call


def _price(new: fx.Node | NewCall) -> float:
    return new.price if isinstance(new, NewCall) else 0.0
