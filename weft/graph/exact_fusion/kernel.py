"""A region's C++ function: compiled at first use, kept if it is seen to have the bits of ATen on this machine."""

import ctypes
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.atomic import write_text
from weft.errors import CompilerError
from weft.graph.exact_fusion.cpp_source import source_of
from weft.graph.fusion import Region
from weft.operators.compile import FLAGS, cache_folder, compile_library

__all__ = ["bind_kernel", "find_kernel", "has_same_bits"]

HEADER = Path(__file__).parent / "operators.h"
KERNEL_FLAGS = (*FLAGS, "-fno-math-errno", "-fno-trapping-math", "-fopenmp", f"-I{HEADER.parent}")
GRAIN = 32768
"""Elements that are worth a thread: as in ATen."""

PROBE = 4099
"""Elements on which a kernel is tried: whole vectors and a rest."""

SPECIAL_SHARE = 0.2
"""Of the probe's numbers: zeros of both signs, infinities, not-a-number, subnormal ones."""

Kernel = Callable[[Any, int, int], None]


_found: dict[str, Kernel | None] = {}  # by source, which regions of other sizes share


def find_kernel(region: Region) -> Kernel | None:
    """The region as machine code `(pointers, size, threads)`. None where there is no compiler, or its bits differ."""
    source = source_of(region)
    if source not in _found:
        try:
            kernel = _compile(source)
        except CompilerError:
            _found[source] = None
        else:
            _found[source] = kernel if has_same_bits(kernel, region) else None
    return _found[source]


def bind_kernel(region: Region, into: Mapping[int, int]) -> Callable[[list[Tensor]], list[Tensor]]:
    """The region as a function of a list: its inputs, and behind them memory for outputs.

    Args:
        into: the places in that list that outputs are written to, by the number of the output. Others are made, and
            returned in order.
    """
    kernel = find_kernel(region)
    assert kernel is not None, region.name
    num_inputs, outputs = len(region.inputs), region.outputs
    size = outputs[0].numel()
    num_threads = max(1, min(torch.get_num_threads(), size // GRAIN))
    fresh = [(i, like.shape, like.stride(), like.dtype) for i, like in enumerate(outputs) if i not in into]
    places = sorted(into.items())
    table = (ctypes.c_void_p * (num_inputs + len(outputs)))()

    def call(given: list[Tensor]) -> list[Tensor]:
        for i, tensor in enumerate(given[:num_inputs]):
            table[i] = tensor.data_ptr()
        for i, place in places:
            table[num_inputs + i] = given[place].data_ptr()
        made = []
        for i, shape, stride, dtype in fresh:
            made.append(torch.empty_strided(shape, stride, dtype=dtype))
            table[num_inputs + i] = made[-1].data_ptr()
        kernel(table, size, num_threads)
        return made

    return call


def has_same_bits(kernel: Kernel, region: Region) -> bool:
    """Whether kernel and operators agree on numbers of all magnitudes, whatever NaNs carry."""
    generator = torch.Generator().manual_seed(0)
    inputs = [_probe(like, generator) for like in region.inputs]
    expected = region.run(inputs)
    made = [torch.empty_like(value) for value in expected]
    table = (ctypes.c_void_p * (len(inputs) + len(made)))(*(tensor.data_ptr() for tensor in (*inputs, *made)))
    kernel(table, PROBE, 1)
    return all(map(_is_same, made, expected))


def _compile(source: str) -> Kernel:
    path = cache_folder() / "sources" / f"region-{hashlib.sha256(source.encode()).hexdigest()[:16]}.cpp"
    if not path.exists():
        write_text(path, source)
    function = ctypes.CDLL(str(compile_library([path, HEADER], flags=KERNEL_FLAGS))).run
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    return function


def _probe(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers near one, then of all magnitudes, with special ones in between. A scalar is one of the first kind."""
    if not like.dim():
        return torch.randn((), generator=generator, dtype=like.dtype)
    values = torch.randn(PROBE, generator=generator, dtype=like.dtype)
    half = PROBE // 2
    values[half:] *= torch.exp(40 * torch.randn(PROBE - half, generator=generator, dtype=like.dtype))
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(like.dtype).tiny / 8], dtype=like.dtype
    )
    chosen = torch.randint(len(special), (PROBE,), generator=generator)
    return torch.where(torch.rand(PROBE, generator=generator) < SPECIAL_SHARE, special[chosen], values)


def _is_same(one: Tensor, other: Tensor) -> bool:
    integers = torch.int32 if one.dtype == torch.float32 else torch.int64
    is_same = (one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())
    return bool(is_same.all())
