"""A forward pass as a list of calls: of layers and blocks, which stay modules, and of the functions between them.

    h = self.embed(tokens)              call  embed             (input/0)           -> v0
    h = h + self.positions[:length]     call  Tensor.shape      (input/0)           -> v1, v2       sizes, as numbers
                                        call  getitem           (positions, :v2)    -> v3
                                        call  add               (v0, v3)            -> v4
    h = self.blocks[0](h, mask=mask)    call  blocks.0          (v4, mask=...)      -> v5

Sizes are values like tensors, so that the calls fit batches of other shapes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = [
    "Attribute",
    "Call",
    "Capture",
    "Value",
    "attributes_of",
    "map_structure",
    "prune",
    "run_call",
    "values_of",
]


@dataclass(frozen=True)
class Value:
    """A reference to a tensor or number that a call, or the batch, gives."""

    id: str


@dataclass(frozen=True)
class Attribute:
    """A reference to a parameter or buffer, by the name that the whole model has for it."""

    name: str


@dataclass(frozen=True, eq=False)
class Call:
    """One call.

    Args:
        target: the path of a module, or a function.
        arguments: positional ones and those by name; values and attributes in them are references.
        outputs: ids of the tensors and numbers in what is returned.
        in_evaluation: the arguments in evaluation mode, where they differ (`F.dropout(x, training=self.training)`).
        writes: whether its first argument is written in place, and is what the call gives.
        is_object: whether what is returned is one value as it is, whatever is in it.
    """

    target: str | Callable[..., Any]
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    outputs: tuple[str, ...]
    in_evaluation: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    writes: bool = False
    is_object: bool = False

    @property
    def name(self) -> str:
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))


@dataclass(frozen=True)
class Capture:
    """All calls of a forward pass in their order.

    Args:
        output: the structure that the model returns, with references in the place of tensors.
        numbers: ids of values that are whole numbers.
        num_bytes: of tensors, by id, as far as they are known.
    """

    calls: tuple[Call, ...]
    output: Any
    numbers: frozenset[str]
    num_bytes: Mapping[str, int]


def map_structure(function: Callable[[Any], Any], structure: Any) -> Any:
    """The structure with every leaf replaced; slices, which hold sizes, are no leaves."""
    if isinstance(structure, slice):
        parts = (structure.start, structure.stop, structure.step)
        return slice(*(map_structure(function, part) for part in parts))
    if isinstance(structure, torch.Size) or type(structure) in (tuple, list):
        kind = tuple if isinstance(structure, torch.Size) else type(structure)
        return kind(map_structure(function, part) for part in structure)
    if type(structure) is dict:
        return {key: map_structure(function, part) for key, part in structure.items()}
    leaves, spec = pytree.tree_flatten(structure)
    if len(leaves) == 1 and leaves[0] is structure:
        return function(structure)
    return pytree.tree_unflatten([map_structure(function, leaf) for leaf in leaves], spec)


def _leaves(structure: Any) -> Iterator[Any]:
    found: list[Any] = []
    map_structure(found.append, structure)
    yield from found


def values_of(structure: Any) -> tuple[str, ...]:
    """Ids of the values in a structure, each once."""
    return tuple(dict.fromkeys(leaf.id for leaf in _leaves(structure) if isinstance(leaf, Value)))


def attributes_of(structure: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(leaf.name for leaf in _leaves(structure) if isinstance(leaf, Attribute)))


def prune(capture: Capture) -> Capture:
    """Without calls that the output does not need, and with values numbered anew: two captures of the same steps are
    equal then, though one has asked for a size that it did not use."""
    needed, kept = set(values_of(capture.output)), list[Call]()
    for call in reversed(capture.calls):
        # What a module gives may be unused (a cache, attention weights); what it does to its statistics is not.
        if isinstance(call.target, str) or any(value in needed for value in call.outputs):
            kept.append(call)
            needed.update(values_of(call.arguments))
    kept.reverse()
    names = {v: f"value/{i}/{j}" for i, call in enumerate(kept) for j, v in enumerate(call.outputs)}

    def rename(leaf: Any) -> Any:
        return Value(names.get(leaf.id, leaf.id)) if isinstance(leaf, Value) else leaf

    calls = [
        replace(call, arguments=map_structure(rename, call.arguments), outputs=tuple(names[v] for v in call.outputs))
        for call in kept
    ]
    numbers = frozenset(names[value] for value in capture.numbers if value in names)
    sizes = {names[value]: size for value, size in capture.num_bytes.items() if value in names}
    return Capture(tuple(calls), map_structure(rename, capture.output), numbers, sizes)


def run_call(call: Call, module: nn.Module, known: Mapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of a call on a module that has its layers, in the module's mode."""

    def find(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return known[leaf.id]
        return _attribute(module, leaf.name) if isinstance(leaf, Attribute) else leaf

    given = call.in_evaluation if call.in_evaluation is not None and not module.training else call.arguments
    args, kwargs = map_structure(find, given)
    function = module.get_submodule(call.target) if isinstance(call.target, str) else call.target
    result = function(*args, **kwargs)
    if call.writes:
        return (args[0],)
    return (result,) if call.is_object else outputs_in(result)


def outputs_in(result: Any) -> tuple[Any, ...]:
    """The tensors and whole numbers in what a call returned, in their order."""
    return tuple(leaf for leaf in _leaves(result) if isinstance(leaf, Tensor | int) and not isinstance(leaf, bool))


def _attribute(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), last)
    return found
