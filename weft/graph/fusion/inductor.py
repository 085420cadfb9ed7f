"""Regions compiled by Inductor, PyTorch's own compiler, to C++ loops.

Equal regions are compiled once in a process, and their machine code is kept on disk by Inductor, under a hash of its
source. What Inductor would pickle beside it is not kept: Weft unpickles nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from weft.errors import GraphError
from weft.graph.fusion.region import Region
from weft.torch_private import compile_with_inductor

__all__ = ["CompiledRegion", "compile_into", "compile_region", "without_aliasing"]

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]


class CompiledRegion:
    """Called with a list of tensors, which it empties: what nobody else holds is freed as soon as it is read.

    The tensors must have the shapes, strides and types of the region; it is an error if they do not.

    Raises:
        GraphError: there is no C++ compiler, or it refuses.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        try:
            function, self.source = compile_with_inductor(region.run, region.inputs)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise GraphError(
                f"region cannot be compiled ({region.name}: {reason}); install a C++ compiler, or run unfuse(graph)"
            ) from error
        self._function = without_aliasing(function)

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        return self._function(inputs)


def compile_region(region: Region) -> CompiledRegion:
    """The compiled region, for the number of threads that PyTorch uses now."""
    return _compiled(region, torch.get_num_threads())


def compile_into(region: Region, into: Mapping[int, int]) -> Compiled:
    """The region as a function of a list, which it empties: its inputs, and behind them memory for outputs.

    Args:
        into: the places in that list that outputs are written to, by the number of the output; the place of an input
            is written over once it has been read. Other outputs are returned, in order.
    """
    if not into:
        return compile_region(region)
    return _compiled_into(region, tuple(sorted(into.items())), torch.get_num_threads())


def without_aliasing(function: Compiled) -> Compiled:
    """The function, with outputs that share no memory with each other or with an input.

    A compiler may return one piece of memory twice, or an input's own. What it does in the first call it always does,
    so the outputs to copy are found there.
    """
    is_shared: list[bool] = []

    def call(inputs: list[Tensor]) -> Sequence[Tensor]:
        if is_shared:
            outputs = function(inputs)
        else:
            held = {_memory(tensor) for tensor in inputs}
            outputs = function(inputs)
            for output in outputs:
                is_shared.append(_memory(output) in held)
                held.add(_memory(output))
        if any(is_shared):
            return [output.clone() if shared else output for output, shared in zip(outputs, is_shared, strict=True)]
        return outputs

    return call


@cache
def _compiled(region: Region, _num_threads: int) -> CompiledRegion:
    return CompiledRegion(region)


@cache
def _compiled_into(region: Region, into: tuple[tuple[int, int], ...], _num_threads: int) -> Compiled:
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
    return function if len(into) == len(outputs) else without_aliasing(function)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
