"""Calls with an effect beside their value: they draw random numbers, talk to other ranks, or write unsaid."""

import torch
from torch import Tensor, fx

__all__ = [
    "COLLECTIVES",
    "FUNCTIONAL_NORM",
    "IN_PLACE_NORM",
    "SILENT_NORM",
    "is_collective",
    "is_pure",
    "is_random",
    "remove_dead",
]

COLLECTIVES = ("weft.all_reduce.", "weft.wait.", "_c10d_functional.")
"""Beginnings of the names of operators that talk to other ranks."""

SILENT_NORM = torch.ops.aten.native_batch_norm.default
"""Batch norm that writes its running statistics and does not say so; the next two compute the same, and do."""
IN_PLACE_NORM = torch.ops.aten._native_batch_norm_legit.default
FUNCTIONAL_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def is_random(node: fx.Node) -> bool:
    """Whether the call draws from the random state, and so must stay, once, in its place among those that do."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_collective(node: fx.Node) -> bool:
    """Whether the call talks to other ranks, which must all make it, in the same order."""
    return str(node.target).startswith(COLLECTIVES)


def is_pure(node: fx.Node) -> bool:
    """Whether the step is the same without the call, if nobody reads its value."""
    return not is_random(node) and not is_collective(node)


def remove_dead(nodes: fx.Graph, _constants: dict[str, Tensor] | None = None) -> int:
    """Erase pure calls that nobody reads; returns how many.

    A random draw stays, since those behind it would draw other numbers without it.
    """
    count = 0
    for node in reversed(list(nodes.nodes)):
        if node.op in ("call_function", "get_attr") and is_pure(node) and not node.users:
            nodes.erase_node(node)
            count += 1
    return count
