"""A region compiled by Inductor, PyTorch's own compiler, to C++ loops.

Equal regions are compiled once in a process, and their machine code is kept on disk by Inductor, under a hash of its
source. What Inductor would pickle beside it is not kept: Weft unpickles nothing.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from weft.errors import GraphError
from weft.graph.fusion.region import Region
from weft.torch_private import compile_with_inductor

__all__ = ["CompiledRegion", "compile_region"]


class CompiledRegion:
    """Called with a list of tensors, which it empties: what nobody else holds is freed as soon as it is read.

    The tensors must have the shapes, strides and types of the region; it is an error if they do not.

    Raises:
        GraphError: there is no C++ compiler, or it refuses.
    """

    def __init__(self, region: Region) -> None:
        self.region = region
        try:
            self._function, self.source = compile_with_inductor(region.run, region.inputs)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise GraphError(
                f"region cannot be compiled ({region.name}: {reason}); install a C++ compiler, or run unfuse(graph)"
            ) from error
        self._is_shared: tuple[bool, ...] | None = None  # which outputs share memory with another or an input

    def __call__(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        if self._is_shared is None:
            return self._first_call(inputs)
        outputs = self._function(inputs)
        if any(self._is_shared):
            pairs = zip(outputs, self._is_shared, strict=True)
            return [output.clone() if is_shared else output for output, is_shared in pairs]
        return outputs

    def _first_call(self, inputs: list[Tensor]) -> Sequence[Tensor]:
        """A compiler may hand out one piece of memory twice, or an input's own; what it does once it always does."""
        held = {_memory(tensor) for tensor in inputs}
        outputs = self._function(inputs)
        is_shared = []
        for output in outputs:
            is_shared.append(_memory(output) in held)
            held.add(_memory(output))
        self._is_shared = tuple(is_shared)
        return [output.clone() if shared else output for output, shared in zip(outputs, is_shared, strict=True)]


def compile_region(region: Region) -> CompiledRegion:
    """The compiled region, for the number of threads that PyTorch uses now."""
    return _compiled(region, torch.get_num_threads())


@cache
def _compiled(region: Region, _num_threads: int) -> CompiledRegion:
    return CompiledRegion(region)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
