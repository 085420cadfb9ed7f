"""Views that are idle, or that one view can replace; no bit changes."""

import torch
from torch import Tensor, fx

from weft.graph.ir.memory_layout import PLAIN_VIEWS, layout_of
from weft.graph.rewrites.pattern import Anything, Call, Found, Op, Var
from weft.graph.rewrites.rule import Rule, pattern_rule

__all__ = ["VIEWS"]

aten = torch.ops.aten

view = Op((aten.view.default,))
expand = Op((aten.expand.default,))
permute = Op((aten.permute.default,))

x, shape, order, then = Var("x"), Anything("shape"), Anything("order"), Anything("then")


def remove_idle_views(nodes: fx.Graph, _constants: dict[str, Tensor]) -> int:
    """Replace a view that shows what one before it shows, or what the tensor itself is, by that."""
    count = 0
    for node in list(nodes.nodes):
        same = _same_further_up(node)
        if same is not None:
            node.replace_all_uses_with(same)
            nodes.erase_node(node)
            count += 1
    return count


def _same_further_up(node: fx.Node) -> fx.Node | None:
    """The first tensor up a chain of views that begins at the same element and has the same shape and strides."""
    seen = node
    while seen.target in PLAIN_VIEWS and isinstance(seen.args[0], fx.Node):
        seen = seen.args[0]
        if isinstance(seen.meta.get("val"), Tensor) and _look(seen) == _look(node):
            return seen
    return None


def _look(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return layout_of(value), str(value.storage_offset())


def _composed(found: Found) -> Call:
    order, then = found["order"], found["then"]
    num_dims = len(order)
    return permute(x, [order[dim % num_dims] % num_dims for dim in then])


VIEWS: tuple[Rule, ...] = (
    Rule("idle views", remove_idle_views),
    pattern_rule("view of a view", view(view(x, shape), then), view(x, then)),
    pattern_rule("expansion of an expansion", expand(expand(x, shape), then), expand(x, then)),
    pattern_rule("permutation of a permutation", permute(permute(x, order), then), _composed),
)
