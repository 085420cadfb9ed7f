"""A fused region compiled to write into memory that it is given."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from weft.graph.fusion import Region, compile_region
from weft.torch_private import compile_with_inductor

__all__ = ["compile_into", "kept_apart"]

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]


def compile_into(region: Region, into: Mapping[int, int]) -> Compiled:
    """The region as a function of a list, which it empties: its inputs, and behind them memory for outputs.

    Args:
        into: the places in that list that outputs are written to, by the number of the output; the place of an input
            is written over once it has been read. Other outputs are returned, in order.
    """
    if not into:
        return compile_region(region)
    return _compiled(region, tuple(sorted(into.items())), torch.get_num_threads())


@cache
def _compiled(region: Region, into: tuple[tuple[int, int], ...], _num_threads: int) -> Compiled:
    num_inputs, places = len(region.inputs), dict(into)
    outputs = region.outputs
    extra = {place: outputs[i] for i, place in into if place >= num_inputs}
    likes = [*region.inputs, *(extra[place] for place in sorted(extra))]

    def run(given: Sequence[Tensor]) -> Sequence[Tensor]:
        made = region.run(given[:num_inputs])
        for i, place in into:
            given[place].copy_(made[i])
        return [value for i, value in enumerate(made) if i not in places]

    function, _ = compile_with_inductor(run, likes)
    return function if len(into) == len(outputs) else kept_apart(function)


def kept_apart(function: Compiled) -> Compiled:
    """A compiler may return one piece of memory twice, or an input's own; then the second is copied."""

    def call(given: list[Tensor]) -> Sequence[Tensor]:
        held = {tensor.untyped_storage().data_ptr() for tensor in given}
        made = []
        for value in function(given):
            place = value.untyped_storage().data_ptr()
            made.append(value.clone() if place in held else value)
            held.add(place)
        return made

    return call
