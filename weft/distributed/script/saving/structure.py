"""Values as JSON and tensors: what `state_dict()` gives, taken apart for a checkpoint and put together again.

    {"lr": 0.1, "state": {0: {"velocity": tensor}}, "betas": (0.9, 0.99)}

    JSON       {"lr": 0.1, "state": {"$items": [[0, {"velocity": {"$tensor": "o/state/0/velocity"}}]]},
                "betas": {"$tuple": [0.9, 0.99]}}
    tensors    o/state/0/velocity

A mapping with one key that begins with `$` is no mapping: it is what JSON lacks. Nothing is pickled, so nothing that is
read can run.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from weft.errors import CorruptFileError, UsageError

__all__ = ["Taken", "put_together", "take_apart", "tensor_names"]


@dataclass(frozen=True)
class Taken:
    """A value taken apart: JSON in which tensors are names, and the tensors."""

    structure: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


def take_apart(name: str, value: Any) -> Taken:
    """The value as JSON and tensors, whose names begin with `name`.

    Raises:
        UsageError: something in it is neither; names it, and its type.

    >>> take_apart("o", {0: (1, torch.ones(2))})
    Taken(structure={'$items': [[0, {'$tuple': [1, {'$tensor': 'o/0/1'}]}]]}, tensors={'o/0/1': tensor([1., 1.])})
    """
    tensors: dict[str, Tensor] = {}
    return Taken(_take(value, name, name, tensors), tensors)


def put_together(structure: Any, find: Callable[[str], Tensor]) -> Any:
    """The value that was taken apart.

    Args:
        find: the tensor of a name.

    Raises:
        CorruptFileError: the structure is not one.
    """
    if isinstance(structure, list):
        return [put_together(item, find) for item in structure]
    if not isinstance(structure, dict):
        return structure
    tag = next(iter(structure), "")
    if not tag.startswith("$") or len(structure) > 1:
        return {key: put_together(item, find) for key, item in structure.items()}
    content = structure[tag]
    try:
        return _MAKERS[tag](content, find)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"checkpoint holds a value of an unknown kind ({tag}: {error!r})") from error


def tensor_names(structure: Any) -> list[str]:
    """The names of all tensors in it."""
    if isinstance(structure, list):
        return [name for item in structure for name in tensor_names(item)]
    if isinstance(structure, dict):
        if len(structure) == 1 and (found := structure.get("$tensor") or structure.get("$array")):
            return [str(found)]
        return [name for item in structure.values() for name in tensor_names(item)]
    return []


# Apart.


def _take(value: Any, where: str, name: str, tensors: dict[str, Tensor]) -> Any:
    """
    Args:
        where: as a user would write it, for an error: optimizer['state'][0].
        name: of a tensor, should it be one: optimizer/state/0.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _keep(value.detach(), name, where, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _keep(_as_tensor(value, where), name, where, tensors)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, Mapping):
        return _take_mapping(value, where, name, tensors)
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        items = [_take(item, f"{where}[{i}]", f"{name}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAGS[_kind_of(value)]: items}
    return _refuse(where, value)


def _take_mapping(value: Mapping[Any, Any], where: str, name: str, tensors: dict[str, Tensor]) -> Any:
    items = {key: _take(item, f"{where}[{key!r}]", f"{name}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, (Counter, OrderedDict)):
        return {_TAGS[_kind_of(value)]: [[_take(key, where, name, tensors), item] for key, item in items.items()]}
    if type(value) is not dict:
        return _refuse(where, value)
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return items
    return {"$items": [[_take(key, where, name, tensors), item] for key, item in items.items()]}


def _keep(tensor: Tensor, name: str, where: str, tensors: dict[str, Tensor]) -> str:
    """Under a name that no other has: two keys may look alike, such as 1 and "1"."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain or tensor.dtype in (torch.complex128, torch.complex32):  # safetensors has no name for them
        _refuse(where, tensor, f"{tensor.layout} tensor of {tensor.dtype}".replace("torch.", ""))
    free = name
    while free in tensors:
        free += "'"
    tensors[free] = tensor
    return free


def _as_tensor(value: Any, where: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except TypeError:
        return _refuse(where, value, f"array of {value.dtype}")


def _kind_of(value: object) -> type:
    return next(kind for kind in _TAGS if isinstance(value, kind))


def _refuse(where: str, value: object, kind: str = "") -> NoReturn:
    raise UsageError(
        f"value is neither JSON nor a tensor, and nothing is pickled ({where}: {kind or type(value).__name__}); "
        "give what can be written of it, or leave it out"
    )


# Together.

_Find = Callable[[str], Tensor]

_TAGS: Mapping[type, str] = {
    tuple: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
    Counter: "$counter",
    OrderedDict: "$ordered",
}


def _pairs(content: Any, find: _Find) -> dict[Any, Any]:
    return {put_together(key, find): put_together(item, find) for key, item in content}


def _dtype(content: Any, _find: _Find) -> torch.dtype:
    dtype = getattr(torch, content)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(content)
    return dtype


_MAKERS: Mapping[str, Callable[[Any, _Find], Any]] = {
    "$tensor": lambda content, find: find(content),
    "$array": lambda content, find: find(content).numpy(),
    "$dtype": _dtype,
    "$device": lambda content, find: torch.device(content),
    "$items": _pairs,
    "$tuple": lambda content, find: tuple(put_together(content, find)),
    "$set": lambda content, find: set(put_together(content, find)),
    "$frozenset": lambda content, find: frozenset(put_together(content, find)),
    "$counter": lambda content, find: Counter(_pairs(content, find)),
    "$ordered": lambda content, find: OrderedDict(_pairs(content, find)),
}
