"""Nested dicts, lists and tuples of tensors, as data: which leaf stands where.

A tree is one of
    ("leaf", 3)                               the tensor at place 3 of a flat list
    ("dict", (("weight", tree), ...))
    ("list", (tree, ...))                     and ("tuple", ...)
    ("constant", 0.5)                         also True, None and text
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from weft.errors import GraphError

__all__ = ["Tree", "add_leaf", "flatten", "flatten_as", "paths_of", "relabel", "remove_leaf", "unflatten"]

Tree = tuple[str, Any]


def flatten(value: Any) -> tuple[list[Tensor], Tree]:
    """The distinct tensors of a nested value, and the tree that says where each stands. A tensor that stands in two
    places (a tied weight) is one leaf.

    >>> import torch
    >>> weight = torch.ones(2)
    >>> flatten({"a": weight, "b": [weight, 3]})[1]
    ('dict', (('a', ('leaf', 0)), ('b', ('list', (('leaf', 0), ('constant', 3))))))
    """
    leaves: list[Tensor] = []
    places: dict[int, int] = {}

    def visit(item: Any, path: str) -> Tree:
        if isinstance(item, Tensor):
            if id(item) not in places:
                places[id(item)] = len(leaves)
                leaves.append(item)
            return "leaf", places[id(item)]
        if isinstance(item, Mapping):
            return "dict", tuple((str(key), visit(part, f"{path}.{key}")) for key, part in item.items())
        if type(item) in (list, tuple):
            return type(item).__name__, tuple(visit(part, f"{path}.{i}") for i, part in enumerate(item))
        if item is None or isinstance(item, (bool, int, float, str)):
            return "constant", item
        kind = type(item).__name__
        raise GraphError(f"not a nested dict, list or tuple of tensors (at: {path or 'top'}, type: {kind}); use vars()")

    return leaves, visit(value, "")


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The nested value again, with these leaves."""
    kind, content = tree
    if kind == "leaf":
        return leaves[content]
    if kind == "dict":
        return {key: unflatten(part, leaves) for key, part in content}
    if kind == "constant":
        return content
    parts = [unflatten(part, leaves) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def flatten_as(tree: Tree, value: Any, num_leaves: int) -> list[Any]:
    """The leaves of a value that has the tree's form, in the tree's order.

    Raises:
        GraphError: the form or a constant differs, or a leaf that stands in two places is not one and the same.
    """
    leaves: list[Any] = [None] * num_leaves

    def visit(part: Tree, item: Any, path: str) -> None:
        kind, content = part
        if kind == "leaf":
            if not isinstance(item, Tensor):
                raise GraphError(f"a tensor is wanted (at: {path}, found: {type(item).__name__})")
            if leaves[content] is not None and leaves[content] is not item:
                raise GraphError(
                    f"tensor was tied to another when captured, and is not now (at: {path}); capture again"
                )
            leaves[content] = item
        elif kind == "constant":
            if item != content or type(item) is not type(content):
                raise GraphError(f"value was {content!r} when captured (at: {path}, found: {item!r}); capture again")
        elif kind == "dict":
            if not isinstance(item, Mapping) or item.keys() != {key for key, _ in content}:
                wanted = ", ".join(key for key, _ in content)
                raise GraphError(f"another form than the captured one (at: {path or 'top'}, wanted keys: {wanted})")
            for key, inner in content:
                visit(inner, item[key], f"{path}.{key}")
        else:
            if not isinstance(item, (list, tuple)) or len(item) != len(content):
                raise GraphError(
                    f"another form than the captured one (at: {path or 'top'}, wanted: {len(content)} items)"
                )
            for i, inner in enumerate(content):
                visit(inner, item[i], f"{path}.{i}")

    visit(tree, value, "")
    return leaves


def paths_of(tree: Tree, path: str = "") -> Iterator[tuple[str, int]]:
    """Every place of a leaf, as `("parameters.0.weight", 3)`."""
    kind, content = tree
    if kind == "leaf":
        yield path, content
    elif kind != "constant":
        pairs = content if kind == "dict" else enumerate(content)
        for key, part in pairs:
            yield from paths_of(part, f"{path}.{key}" if path else str(key))


def relabel(tree: Tree, labels: Mapping[str, int], path: str = "") -> Tree:
    """The same tree with the leaf at each path numbered anew."""
    kind, content = tree
    if kind == "leaf":
        return kind, labels[path]
    if kind == "constant":
        return tree
    pairs = content if kind == "dict" else tuple(enumerate(content))
    parts = [(key, relabel(part, labels, f"{path}.{key}" if path else str(key))) for key, part in pairs]
    return kind, tuple(parts) if kind == "dict" else tuple(part for _, part in parts)


def add_leaf(tree: Tree, path: str, leaf: int) -> Tree:
    """The tree with one more leaf, at a new key of a dict.

    >>> add_leaf(("dict", (("a", ("leaf", 0)),)), "b.c", 1)
    ('dict', (('a', ('leaf', 0)), ('b', ('dict', (('c', ('leaf', 1)),)))))
    """
    kind, content = tree
    first, _, rest = path.partition(".")
    if kind != "dict":
        raise GraphError(f"something can be added to a dict only (at: {path}, found: {kind})")
    before = dict(content)
    if not rest and first in before:
        raise GraphError(f"there is something already (at: {path}); choose another name")
    part = add_leaf(before.get(first, ("dict", ())), rest, leaf) if rest else ("leaf", leaf)
    return kind, tuple({**before, first: part}.items())


def remove_leaf(tree: Tree, path: str) -> Tree:
    """The tree without a leaf, which stands in a dict; a dict that it leaves empty stays.

    >>> remove_leaf(("dict", (("a", ("leaf", 0)), ("b", ("leaf", 1)))), "a")
    ('dict', (('b', ('leaf', 1)),))
    """
    kind, content = tree
    first, _, rest = path.partition(".")
    if kind != "dict":
        raise GraphError(f"something can be taken out of a dict only (at: {path}, found: {kind})")
    parts = {key: remove_leaf(part, rest) if key == first and rest else part for key, part in content}
    if not rest:
        del parts[first]
    return kind, tuple(parts.items())
