"""The compiled kernels, bound through their C interface. They take tensors that lie in one piece on the CPU."""

import ctypes
import warnings
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.distributed.codecs.kernels.random import split_key
from weft.errors import CompilerError
from weft.operators.compile import FLAGS, compile_library

SOURCES = ("kernels.cpp", "above.h", "low_rank.h", "packing.h", "quantise.h", "select.h", "sparse.h", "words.h")
# Loops may compute what a branch would have left out: no trap and no errno looks at it, and no bit changes.
KERNEL_FLAGS = (*FLAGS, "-fno-math-errno", "-fno-trapping-math")

RUN = 64  # of above.h, at most; the next is of select.h
NUM_SAMPLES = 2**16
SPARE = 4096
"""Candidates beyond twice the wanted number before the best of them are picked out."""

_INT, _LONG, _WORD, _DOUBLE, _POINTER = (
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_uint32,
    ctypes.c_double,
    ctypes.c_void_p,
)
_UPDATE = [_POINTER, _POINTER, _DOUBLE, _POINTER, _DOUBLE, _INT, _LONG]
_TYPED: dict[str, tuple[Any, list[Any]]] = {
    "weft_add": (None, _UPDATE),
    "weft_block_norms": (None, [_POINTER, _LONG, _LONG, _INT, _POINTER]),
    "weft_decode_signs": (None, [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _INT, _POINTER]),
    "weft_dequantise": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _INT, _POINTER]),
    "weft_encode_signs": (None, [_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER, _POINTER]),
    "weft_merge": (_LONG, [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG, _POINTER, _POINTER]),
    "weft_multiply_factors": (None, [_POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER]),
    "weft_orthogonalise": (None, [_POINTER, _LONG, _LONG, _POINTER]),
    "weft_quantise": (None, [_POINTER, _POINTER, _LONG, _LONG, _INT, _WORD, _WORD, _POINTER]),
    "weft_scatter_add": (None, [_POINTER, _POINTER, _POINTER, _LONG]),
    "weft_select": (None, [*_UPDATE, _LONG, _POINTER, _POINTER, _POINTER, _LONG, _POINTER]),
    "weft_select_above": (_LONG, [*_UPDATE, _DOUBLE, _POINTER]),
    "weft_take": (None, [_POINTER, _POINTER, _LONG, _POINTER]),
}
_UNTYPED: dict[str, tuple[Any, list[Any]]] = {
    "weft_are_ascending": (_INT, [_POINTER, _LONG]),
    "weft_are_within": (_INT, [_POINTER, _LONG, _LONG]),
    "weft_uniform": (None, [_WORD, _WORD, _LONG, _POINTER]),
}
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}


@cache
def load_library() -> dict[str, Any]:
    """The kernels by name, compiled at the first use. Other Python threads run meanwhile."""
    here = Path(__file__).parent
    library = ctypes.CDLL(str(compile_library([here / name for name in SOURCES], flags=KERNEL_FLAGS)))
    typed = {f"{name}_{suffix}": types for name, types in _TYPED.items() for suffix in _SUFFIXES.values()}
    functions: dict[str, Any] = {}
    for name, (result, arguments) in (typed | _UNTYPED).items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


@cache
def is_available() -> bool:
    """Whether the kernels can be compiled; a warning says why not."""
    try:
        load_library()
    except CompilerError as error:
        warnings.warn(f"gradients are compressed in torch, at a small part of the speed: {error}", stacklevel=3)
        return False
    return True


def uniform(key: int, num: int) -> Tensor:
    out = torch.empty(num, dtype=torch.float32)
    load_library()["weft_uniform"](*split_key(key), num, out.data_ptr())
    return out


def add(kept: Tensor, message: Tensor, scale: float) -> None:
    _function("weft_add", kept)(*_update(kept, message, scale, None, 0.0, False))


def add_momentum(
    velocity: Tensor, kept: Tensor, message: Tensor, scale: float, momentum: float, nesterov: bool
) -> None:
    _function("weft_add", kept)(*_update(kept, message, scale, velocity, momentum, nesterov))


def add_and_select(
    kept: Tensor,
    message: Tensor | None,
    scale: float,
    num: int,
    *,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    update = _update(kept, message, scale, velocity, momentum, nesterov)
    chosen = torch.empty(num, dtype=torch.int32)
    if num == 0:
        _function("weft_add", kept)(*update)
        return chosen
    capacity = min(kept.numel(), 2 * num + SPARE) + RUN
    words = kept.new_empty(capacity)
    scratch = kept.new_empty(max(capacity, 2 * NUM_SAMPLES))
    indices = torch.empty(capacity, dtype=torch.int32)
    _function("weft_select", kept)(
        *update, num, words.data_ptr(), scratch.data_ptr(), indices.data_ptr(), capacity, chosen.data_ptr()
    )
    return chosen


def add_and_select_above(
    kept: Tensor,
    message: Tensor | None,
    scale: float,
    threshold: float,
    *,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    chosen = torch.empty(kept.numel(), dtype=torch.int32)  # of which only pages that are written to exist
    update = _update(kept, message, scale, velocity, momentum, nesterov)
    found = _function("weft_select_above", kept)(*update, threshold, chosen.data_ptr())
    return chosen[:found].clone()


def take(kept: Tensor, indices: Tensor, velocity: Tensor | None = None) -> Tensor:
    values = kept.new_empty(indices.numel())
    function = _function("weft_take", kept)
    if velocity is not None:
        function(velocity.data_ptr(), indices.data_ptr(), indices.numel(), values.data_ptr())
    function(kept.data_ptr(), indices.data_ptr(), indices.numel(), values.data_ptr())
    return values


def are_within(indices: Tensor, num: int) -> bool:
    return bool(load_library()["weft_are_within"](indices.data_ptr(), indices.numel(), num))


def are_ascending(indices: Tensor) -> bool:
    return bool(load_library()["weft_are_ascending"](indices.data_ptr(), indices.numel()))


def scatter_add(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    _function("weft_scatter_add", dense)(dense.data_ptr(), indices.data_ptr(), values.data_ptr(), indices.numel())


def merge(indices_a: Tensor, values_a: Tensor, indices_b: Tensor, values_b: Tensor) -> tuple[Tensor, Tensor]:
    most = indices_a.numel() + indices_b.numel()
    indices, values = torch.empty(most, dtype=torch.int32), values_a.new_empty(most)
    found = _function("weft_merge", values)(
        indices_a.data_ptr(),
        values_a.data_ptr(),
        indices_a.numel(),
        indices_b.data_ptr(),
        values_b.data_ptr(),
        indices_b.numel(),
        indices.data_ptr(),
        values.data_ptr(),
    )
    return indices[:found], values[:found]


def block_norms(x: Tensor, block: int, kind: Literal["l2", "max"]) -> Tensor:
    norms = torch.empty(-(-x.numel() // block), dtype=torch.float32)
    _function("weft_block_norms", x)(x.data_ptr(), x.numel(), block, kind == "l2", norms.data_ptr())
    return norms


def quantise(x: Tensor, norms: Tensor, block: int, bits: int, key: int) -> Tensor:
    codes = torch.empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
    _function("weft_quantise", x)(
        x.data_ptr(), norms.data_ptr(), x.numel(), block, bits, *split_key(key), codes.data_ptr()
    )
    return codes


def dequantise(codes: Tensor, norms: Tensor, block: int, bits: int, out: Tensor, add: bool = False) -> None:
    _function("weft_dequantise", out)(codes.data_ptr(), norms.data_ptr(), out.numel(), block, bits, add, out.data_ptr())


def encode_signs(kept: Tensor, block: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    codes = torch.empty(-(-kept.numel() // 8), dtype=torch.uint8)
    scales = torch.empty(2, -(-kept.numel() // block), dtype=torch.float32)
    _function("weft_encode_signs", kept)(
        kept.data_ptr(), kept.numel(), block, symmetric, codes.data_ptr(), *_rows(scales)
    )
    return codes, scales


def decode_signs(codes: Tensor, scales: Tensor, block: int, out: Tensor, add: bool = False) -> None:
    _function("weft_decode_signs", out)(codes.data_ptr(), *_rows(scales), out.numel(), block, add, out.data_ptr())


def orthogonalise(matrix: Tensor) -> None:
    columns = torch.empty(matrix.numel(), dtype=torch.float64)
    _function("weft_orthogonalise", matrix)(matrix.data_ptr(), *matrix.shape, columns.data_ptr())


def multiply_factors(left: Tensor, right: Tensor, out: Tensor) -> None:
    (rows, rank), columns = left.shape, right.shape[0]
    by_column = right.t().contiguous()
    _function("weft_multiply_factors", out)(left.data_ptr(), by_column.data_ptr(), rows, columns, rank, out.data_ptr())


def _function(name: str, like: Tensor) -> Any:
    return load_library()[f"{name}_{_SUFFIXES[like.dtype]}"]


def _update(
    kept: Tensor, message: Tensor | None, scale: float, velocity: Tensor | None, momentum: float, nesterov: bool
) -> tuple[int, int | None, float, int | None, float, bool, int]:
    return (
        kept.data_ptr(),
        None if message is None else message.data_ptr(),
        scale,
        None if velocity is None else velocity.data_ptr(),
        momentum,
        nesterov,
        kept.numel(),
    )


def _rows(scales: Tensor) -> tuple[int, int]:
    """The addresses of both rows; a tensor of no blocks has none."""
    start = scales.data_ptr()
    return start, start + scales.shape[1] * scales.itemsize
