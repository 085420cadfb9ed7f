"""Blocks of a model: the parameters that are gathered together, before the layers that need them compute.

    model                             blocks
      embedding                       0 (the model's own)   embedding, norm, head: from the first layer to the last
      layers: ModuleList
        layer 0                       1                     layer 0
        layer 1                       2                     layer 1
      norm, head                      small neighbours are one block

A block is what a child of a Sequential or a ModuleList has: containers have no computation of their own, so nobody else
uses its parameters. One that several blocks share (tied weights) is the model's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["LEAST_BYTES", "Block", "find_blocks"]

LEAST_BYTES = 1 << 17
"""Smaller blocks are gathered with the next one: below it a message costs its latency."""


@dataclass(frozen=True)
class Block:
    """Args:
    names: of parameters, as the model knows them.
    modules: whose forward needs them; none for the model itself.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...] = ()


def find_blocks(module: nn.Module, least_bytes: int = LEAST_BYTES) -> tuple[Block, ...]:
    """The model's own block, which may be empty, and then the others in their order; every parameter is in one.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> [block.names for block in find_blocks(model, least_bytes=1)]
    [(), ('0.weight', '0.bias'), ('2.weight', '2.bias')]
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    sizes = {name: parameter.nbytes for name, parameter in module.named_parameters()}
    children = _unique(_children_of_containers(module))
    own = _outside(module, {id(child) for child in children})
    seen: set[int] = set()
    for child in children:
        held = {id(parameter) for parameter in child.parameters()}
        own |= held & seen
        seen |= held
    blocks: list[Block] = []
    pending: list[nn.Module] = []
    found: dict[str, None] = {}
    for child in children:
        held_names = [names[id(parameter)] for parameter in child.parameters() if id(parameter) not in own]
        if not held_names:
            continue
        pending.append(child)
        found |= dict.fromkeys(held_names)
        if sum(sizes[name] for name in found) >= least_bytes:
            blocks.append(Block(tuple(found), tuple(pending)))
            pending, found = [], {}
    if found:
        blocks.append(Block(tuple(found), tuple(pending)))
    return (Block(tuple(name for key, name in names.items() if key in own)), *blocks)


def _children_of_containers(module: nn.Module) -> Iterator[nn.Module]:
    is_container = isinstance(module, nn.Sequential | nn.ModuleList)
    for child in module.children():
        if is_container and not isinstance(child, nn.Sequential | nn.ModuleList):
            yield child
        else:
            yield from _children_of_containers(child)


def _unique(modules: Iterator[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _outside(module: nn.Module, blocks: set[int]) -> set[int]:
    """The parameters of modules that are in no block."""
    found = {id(parameter) for parameter in module._parameters.values() if parameter is not None}
    for child in module.children():
        if id(child) not in blocks:
            found |= _outside(child, blocks)
    return found
