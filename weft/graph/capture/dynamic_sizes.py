"""Dynamic sizes of a capture: dimensions that go by a name, and the conditions under which the step was traced.

dynamic="batch"                                   dimension 0 of every tensor of the batch
dynamic={"batch.x": {0: "batch", 1: "length"}}    of one tensor
dynamic={"batch": {0: "batch", 1: "length"}}      of every tensor below a place, where it has that dimension
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import GraphError, nearest
from weft.graph.capture.source_lines import quoted_line_on_stack
from weft.graph.ir.pytree import Tree, paths_of
from weft.graph.ir.symbolic_sizes import SMALLEST, Condition, Size, condition_of, places_of, shape_of
from weft.torch_private import fake_mode, fake_of, hint_of, settle_sizes, symbolic_mode

__all__ = ["Dims", "Dynamic", "conditions_of", "dims_of", "example_of", "fakes_of", "names_of"]

Dynamic = str | Mapping[str, Mapping[int, str]]
Dims = Mapping[int, Mapping[int, str]]
"""The name of each dimension that has one, for each leaf that has such."""


def dims_of(dynamic: Dynamic | None, arguments: Tree, leaves: Sequence[Tensor]) -> Dims:
    """The named dimensions of each leaf.

    Raises:
        GraphError: a place or dimension that is not there.
    """
    if dynamic is None:
        return {}
    wanted = {"batch": {0: dynamic}} if isinstance(dynamic, str) else dynamic
    places = list(paths_of(arguments))
    dims: dict[int, dict[int, str]] = {}
    for place, names in wanted.items():
        below = {leaf: path for path, leaf in places if path == place or path.startswith(f"{place}.")}
        if not below:
            known = [path for path, _ in places]
            raise GraphError(f"no such place in state or batch (dynamic: {place}); {nearest(place, known)}")
        for dim, name in names.items():
            having = [leaf for leaf in below if -leaves[leaf].ndim <= dim < leaves[leaf].ndim]
            if not having:
                raise GraphError(f"no tensor has this dimension (dynamic: {place}, dimension: {dim})")
            for leaf in having:
                dims.setdefault(leaf, {})[dim % leaves[leaf].ndim] = name
    return dims


def fakes_of(leaves: Sequence[Tensor], dims: Dims, arguments: Tree) -> tuple[Any, list[Tensor]]:
    """A mode and fake tensors like the leaves, in which named dimensions are symbols."""
    paths = {leaf: path for path, leaf in paths_of(arguments)}
    mode, symbols = symbolic_mode(_examples(leaves, dims, paths), quoted_line_on_stack) if dims else (fake_mode(), {})
    num_holders = Counter(leaf.untyped_storage()._cdata for leaf in leaves if leaf.layout is torch.strided)
    fakes = []
    for place, leaf in enumerate(leaves):
        if place in dims:
            sizes = [symbols[dims[place][dim]] if dim in dims[place] else n for dim, n in enumerate(leaf.shape)]
            with mode:
                fake = torch.empty_strided(sizes, _strides(leaf, sizes), dtype=leaf.dtype, device=leaf.device)
        elif _is_plain(leaf) and num_holders[leaf.untyped_storage()._cdata] == 1:
            fake = fake_of(mode, leaf)
        else:
            fake = mode.from_tensor(leaf.detach(), static_shapes=True)
        fakes.append(fake.requires_grad_(leaf.requires_grad))
    return mode, fakes


def conditions_of(mode: Any, fakes: Sequence[Tensor]) -> tuple[Condition, ...]:
    """The conditions on its sizes under which a step was traced.

    Raises:
        GraphError: it takes a size for a number, or for another size; names the line.
    """
    if mode.shape_env is None:
        return ()
    free = places_of(fakes)
    conditions = dict.fromkeys(condition_of(*settled) for settled in settle_sizes(mode))
    for condition in conditions:
        is_of_names = all(type(side) is int or _is_name(side) for side in (condition.left, condition.right))
        if condition.relation == "eq" and (is_of_names or not condition.names <= free.keys()):
            raise GraphError(
                f"step needs one size where any was asked for ({condition}, {condition.line}); "
                "write it for any size, or leave the size out of dynamic"
            )
    return tuple(conditions)


def example_of(fake: Tensor) -> Tensor:
    """A real tensor like a fake one, with the sizes of the capture for named ones; what it holds is undefined."""
    sizes, strides = ([hint_of(size) for size in part] for part in (fake.shape, fake.stride()))
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)


def names_of(fake: Tensor) -> dict[int, str]:
    """The name of each dimension that has one."""
    return {dim: str(size) for dim, size in enumerate(shape_of(fake)) if isinstance(size, Size)}


def _examples(leaves: Sequence[Tensor], dims: Dims, paths: Mapping[int, str]) -> dict[str, int]:
    """The size that each name has now."""
    examples: dict[str, int] = {}
    for leaf, names in dims.items():
        for dim, name in names.items():
            Size("name", (name,))  # refuses what cannot be one
            size = leaves[leaf].shape[dim]
            if examples.setdefault(name, size) != size:
                raise GraphError(f"one name for two sizes ({name}: {examples[name]}, at {paths[leaf]}: {size})")
            if size < SMALLEST:
                raise GraphError(f"a named size is at least {SMALLEST} ({name}: {size}); capture with a larger example")
    return examples


def _strides(leaf: Tensor, sizes: Sequence[Any]) -> list[Any]:
    """Strides in the order in which the leaf lies in memory, without gaps."""
    strides: list[Any] = [1] * leaf.ndim
    step: Any = 1
    plain = 1
    for dim in sorted(range(leaf.ndim), key=lambda dim: (leaf.stride(dim), leaf.shape[dim] > 1)):
        if leaf.shape[dim] > 1 and leaf.stride(dim) != plain:
            raise GraphError(f"a tensor with a named size lies in memory without gaps (strides: {leaf.stride()})")
        strides[dim], step, plain = step, step * sizes[dim], plain * leaf.shape[dim]
    return strides


def _is_plain(leaf: Tensor) -> bool:
    is_of_torch = type(leaf) in (Tensor, nn.Parameter, nn.Buffer)
    return is_of_torch and leaf.layout is torch.strided and not (leaf.is_conj() or leaf.is_neg())


def _is_name(size: Any) -> bool:
    return isinstance(size, Size) and size.kind == "name"
