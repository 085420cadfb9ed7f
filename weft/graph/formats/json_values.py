"""Arguments of operators, shapes and conditions as JSON and back.

Numbers, text, true, false, null and lists stand for themselves; the rest is an object of one key:
    {"node": "mm"}   {"float": "inf"}   {"complex": [0.0, 1.0]}   {"dict": {"alpha": 2}}   {"tuple": [...]}
    {"dtype": "float32"}   {"device": "cpu"}   {"layout": "strided"}   {"memory_format": "contiguous_format"}
    {"size": ["mul", 2, {"size": ["name", "batch"]}]}
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from weft.errors import CorruptFileError, GraphError
from weft.graph.ir.pytree import Tree
from weft.graph.ir.symbolic_sizes import Condition, Size, resolved, shape_of, strides_of

__all__ = ["decode", "decode_condition", "decode_tree", "decode_value", "encode", "encode_condition", "encode_value"]

_TORCH_KINDS = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def encode(value: Any) -> Any:
    """An argument of a call as JSON.

    >>> encode((1, float("-inf"), torch.int64))
    {'tuple': [1, {'float': '-inf'}, {'dtype': 'int64'}]}
    """
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, wanted in _TORCH_KINDS.items():
        if isinstance(value, wanted):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, Size):
        return {"size": [value.kind, *(encode(part) for part in value.parts)]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    raise GraphError(f"value cannot be saved ({type(value).__name__})")


def decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """The value that `encode` wrote; a node must be among those that came before."""
    if isinstance(value, list):
        return [decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind in _TORCH_KINDS:
        return _constant_of_torch(kind, content)
    if kind == "size":
        return Size(content[0], tuple(decode(part, {}) for part in content[1:]))
    if kind == "tuple":
        return tuple(decode(item, nodes) for item in content)
    if kind == "dict":
        return {str(key): decode(item, nodes) for key, item in content.items()}
    raise CorruptFileError(f"saved graph has a value of an unknown kind ({kind!r})")


def decode_tree(value: Any) -> Tree:
    """A tree of `ir/pytree.py`, each part of a kind that it knows."""
    tree: Tree = decode(value, {})
    _check_tree(tree)
    return tree


def encode_value(value: Any) -> Any:
    """Shape, strides, type and device of a tensor, or of each of several."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape, strides = (encode(list(part)) for part in (shape_of(value), strides_of(value)))
        return {"shape": shape, "stride": strides, "dtype": dtype, "device": str(value.device)}
    return [encode_value(item) for item in value] if isinstance(value, (tuple, list)) else None


def decode_value(value: Any, mode: Any, sizes: Mapping[str, Any]) -> Any:
    """A tensor without values, as `mode` makes them, whose named sizes are these symbols."""
    if isinstance(value, list):
        return [decode_value(item, mode, sizes) for item in value]
    if value is None:
        return None
    dtype = _constant_of_torch("dtype", value["dtype"])
    shape, strides = (resolved(decode(value[key], {}), sizes) for key in ("shape", "stride"))
    with mode:
        return torch.empty_strided(shape, strides, dtype=dtype, device=value["device"])


def encode_condition(condition: Condition) -> Any:
    return [condition.relation, encode(condition.left), encode(condition.right), condition.line]


def decode_condition(value: Any) -> Condition:
    relation, left, right, line = value
    return Condition(relation, decode(left, {}), decode(right, {}), str(line))


def _constant_of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(found, _TORCH_KINDS[kind]):
        raise CorruptFileError(f"saved graph names a {kind} that is not known here ({name!r})")
    return found


def _check_tree(tree: Any) -> None:
    kind, content = tree
    if kind == "dict":
        for key, part in content:
            if not isinstance(key, str):
                raise CorruptFileError(f"saved graph has a key that is no text ({key!r})")
            _check_tree(part)
    elif kind in ("list", "tuple"):
        for part in content:
            _check_tree(part)
    elif kind not in ("leaf", "constant") or (kind == "leaf" and type(content) is not int):
        raise CorruptFileError(f"saved graph has a tree of an unknown kind ({kind!r})")
