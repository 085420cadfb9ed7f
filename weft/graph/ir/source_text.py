"""Nodes written as Python source: the names of operators and variables, and the arguments of calls."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from weft.graph.ir.symbolic_sizes import Size

__all__ = ["HEADER", "argument_text", "line_of_node", "literal", "name_of", "variable_names"]

HEADER = '''"""A training step, generated from its graph: for reading and for stepping through with a debugger."""

import torch
'''


def name_of(target: Any) -> str:
    """`aten.mm`, or `aten.add.Tensor` where the overload is not the default one."""
    return str(target).removesuffix(".default")


def argument_text(args: Sequence[Any], kwargs: Mapping[str, Any], name: Callable[[fx.Node], str] = str) -> str:
    """The text between the brackets of a call.

    >>> argument_text([[1, 2], None], {"alpha": 0.5})
    '[1, 2], None, alpha=0.5'
    """
    return ", ".join([literal(value, name) for value in args] + [f"{k}={literal(v, name)}" for k, v in kwargs.items()])


def line_of_node(node: fx.Node) -> str:
    """The line of the user's code, fit for a comment: nothing in it ends the comment early."""
    return "".join(filter(str.isprintable, node.meta.get("line", "")))


def literal(value: Any, name: Callable[[fx.Node], str] = str) -> str:
    """The source text of a node, a number, a named size, a torch constant, or a nested tuple or list of them.

    Args:
        name: what a node is called.

    >>> literal([1, float("inf"), torch.float32])
    '[1, float("inf"), torch.float32]'
    """
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (tuple, list)):
        inside = ", ".join(literal(item, name) for item in value)
        return f"[{inside}]"  # operators take lists and tuples alike
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (Size, torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return repr(value)
    raise AssertionError(f"no literal: {value!r}")


def variable_names(nodes: Iterable[fx.Node], taken: Collection[str]) -> dict[fx.Node, str]:
    """Names of nodes as variables, none of which hides a name that is taken."""
    names: dict[fx.Node, str] = {}
    used = set(taken)
    for node in nodes:
        name = node.name
        while name in used:
            name += "_"
        used.add(name)
        names[node] = name
    return names
