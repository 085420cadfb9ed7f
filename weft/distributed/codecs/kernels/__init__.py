"""Kernels of gradient compression: machine code where it can be had, else torch, with the same bits.

Tensors are flat, of fewer than 2^31 elements, and float32 or float64 ("T"), those of one call alike. Places are int32.
A tensor that is wrong in size or type is a bug and an `AssertionError`; numbers that came from another rank and cannot
be right are a `ValueError` that states the fact.
"""

from types import ModuleType as _ModuleType
from typing import Literal as _Literal

import torch as _torch
from torch import Tensor as _Tensor

from weft.distributed.codecs.kernels import definition as _definition
from weft.distributed.codecs.kernels import native as _native
from weft.distributed.codecs.kernels import random as _random
from weft.distributed.codecs.kernels.random import derive_key

__all__ = [
    "add",
    "add_and_select",
    "add_and_select_above",
    "add_momentum",
    "block_norms",
    "decode_signs",
    "dequantise",
    "derive_key",
    "encode_signs",
    "estimate_threshold",
    "merge",
    "multiply_factors",
    "num_blocks",
    "orthogonalise",
    "packed_size",
    "quantise",
    "scatter_add",
    "take",
    "uniform",
]


def num_blocks(num: int, block: int) -> int:
    """How many blocks `num` elements have; the last may be short."""
    assert num >= 0 and block > 0, (num, block)
    return -(-num // block)


def packed_size(num: int, bits: int) -> int:
    """Bytes of `num` codes of 1, 2, 4 or 8 bits each."""
    assert bits in (1, 2, 4, 8), bits
    return -(-num * bits // 8)


def uniform(key: int, num: int, device: _torch.device | str = "cpu") -> _Tensor:
    """Float32 numbers in [0, 1), multiples of 2^-24: element i is that of counter i and a key of `derive_key`."""
    if _torch.device(device).type == "cpu" and _native.is_available():
        return _native.uniform(key, num)
    return _random.uniform(key, num, device)


def add(kept: _Tensor, message: _Tensor, scale: float) -> None:
    """kept += scale * message in place; `scale` is rounded to T, then the product, then the sum."""
    _check_floats(kept, message)
    _choose(kept, message).add(kept, message, scale)


def add_momentum(
    velocity: _Tensor, kept: _Tensor, message: _Tensor, scale: float, momentum: float, nesterov: bool = False
) -> None:
    """Add a gradient to a velocity and the velocity to what is kept (DGC, equations 4 and 5), in place.

    With g = scale * message, u the velocity and v what is kept:

        plain      u = momentum * u + g      v = v + u
        nesterov   u = momentum * (u + g)    v = v + (u + g)

    Args:
        velocity: u, changed in place.
        kept: v, changed in place.
        message: the fresh gradient.
        scale: by which it is multiplied first, such as 1 / number of ranks.
    """
    _check_floats(kept, message, velocity)
    _choose(kept, message, velocity).add_momentum(velocity, kept, message, scale, momentum, nesterov)


def add_and_select(
    kept: _Tensor,
    message: _Tensor | None,
    scale: float,
    num: int,
    *,
    velocity: _Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> _Tensor:
    """Add a message to what is kept, and find the `num` elements of largest magnitude, exactly.

    Magnitudes are ordered by the bits of |x|: finite < infinite < not a number. Of equals the lower place wins.

    Args:
        kept: changed in place.
        message: None adds nothing.
        scale: the message is multiplied by it first.
        num: at most the number of elements.
        velocity: adds by way of `add_momentum`, with the two arguments after it.

    Returns:
        Places in ascending order, int32 [num].
    """
    _check_floats(kept, message, velocity)
    assert 0 <= num <= kept.numel(), (num, kept.numel())
    kernels = _choose(kept, message, velocity)
    chosen: _Tensor = kernels.add_and_select(
        kept, message, scale, num, velocity=velocity, momentum=momentum, nesterov=nesterov
    )
    return chosen


def add_and_select_above(
    kept: _Tensor,
    message: _Tensor | None,
    scale: float,
    threshold: float,
    *,
    velocity: _Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> _Tensor:
    """Add a message to what is kept, and find all elements with |x| >= threshold, or not a number.

    Args:
        kept: changed in place.
        message: None adds nothing.
        scale: the message is multiplied by it first.
        threshold: at least 0; rounded to T.
        velocity: adds by way of `add_momentum`, with the two arguments after it.

    Returns:
        Places in ascending order, int32.
    """
    _check_floats(kept, message, velocity)
    assert threshold >= 0, threshold
    kernels = _choose(kept, message, velocity)
    chosen: _Tensor = kernels.add_and_select_above(
        kept, message, scale, threshold, velocity=velocity, momentum=momentum, nesterov=nesterov
    )
    return chosen


def estimate_threshold(
    kept: _Tensor,
    message: _Tensor | None,
    scale: float,
    num: int,
    key: int,
    *,
    velocity: _Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> float:
    """The magnitude that about `num` elements would reach after the message was added, from a sample. Changes nothing.

    Args:
        kept: at least one element.
        message: None adds nothing.
        scale: the message is multiplied by it first.
        num: at least 1, at most the number of elements.
        key: chooses the sample; of `derive_key`.
        velocity: adds by way of `add_momentum`, with the two arguments after it.

    Returns:
        At least the smallest normal number of T, as zeros are not worth sending; infinite where what is not a number
        fills the places.
    """
    _check_floats(kept, message, velocity)
    assert 1 <= num <= kept.numel(), (num, kept.numel())
    return _definition.estimate_threshold(
        kept, message, scale, num, key, velocity=velocity, momentum=momentum, nesterov=nesterov
    )


def take(kept: _Tensor, indices: _Tensor, velocity: _Tensor | None = None) -> _Tensor:
    """kept[indices]; `kept`, and a velocity (DGC's momentum factor masking), become zero there."""
    _check_floats(kept, velocity)
    _check_indices(indices)
    kernels = _choose(kept, indices, velocity)
    assert kernels.are_within(indices, kept.numel()), kept.numel()
    values: _Tensor = kernels.take(kept, indices, velocity)
    return values


def scatter_add(dense: _Tensor, indices: _Tensor, values: _Tensor) -> None:
    """dense[i] += v for each place and value, in order.

    Raises:
        ValueError: a place is not in `dense`; nothing was added.
    """
    _check_floats(dense)
    _check_stream(indices, values)
    assert values.dtype == dense.dtype, (values.dtype, dense.dtype)
    kernels = _choose(dense, indices, values)
    if not kernels.are_within(indices, dense.numel()):
        low, high = (int(bound) for bound in _torch.aminmax(indices))
        raise ValueError(f"place outside of the tensor (places: {low} to {high}, elements: {dense.numel()})")
    kernels.scatter_add(dense, indices, values)


def merge(indices_a: _Tensor, values_a: _Tensor, indices_b: _Tensor, values_b: _Tensor) -> tuple[_Tensor, _Tensor]:
    """The sum of two sparse streams: places of either, and a + b where both have one.

    Args:
        indices_a: ascending, each once.
        values_a: as many.
        indices_b: ascending, each once.
        values_b: as many.

    Raises:
        ValueError: places do not ascend from 0 or above.
    """
    kernels = _choose(values_a, values_b, indices_a, indices_b)
    for indices, values in ((indices_a, values_a), (indices_b, values_b)):
        _check_stream(indices, values)
        if not kernels.are_ascending(indices):
            raise ValueError(f"places of a sparse stream do not ascend (places: {indices.numel()})")
    assert values_a.dtype == values_b.dtype, (values_a.dtype, values_b.dtype)
    merged: tuple[_Tensor, _Tensor] = kernels.merge(indices_a, values_a, indices_b, values_b)
    return merged


def block_norms(x: _Tensor, block: int, kind: _Literal["l2", "max"]) -> _Tensor:
    """The 2-norm or the largest magnitude of each block, rounded to float32; not finite where an element is not."""
    _check_floats(x)
    assert block > 0 and kind in ("l2", "max"), (block, kind)
    norms: _Tensor = _choose(x).block_norms(x, block, kind)
    return norms


def quantise(x: _Tensor, norms: _Tensor, block: int, bits: int, key: int) -> _Tensor:
    """QSGD: magnitudes on a grid of s = 2^(bits - 1) - 1 levels of a block's norm, rounded at random without bias.

        r = min(|x| * (s / norm), s)     level = min(floor(r + u), s), u uniform in [0, 1)
        code = level | sign << (bits - 1)

    Codes of a block are 0 if its norm is 0, so small that s / norm overflows, or not finite. In the last case
    `dequantise` gives what is not a number for all of it.

    Args:
        norms: float32, one for each block.
        bits: 2, 4 or 8.
        key: of `derive_key`, another one for every message.

    Returns:
        Bytes of 8 / bits codes, the first in the low bits.
    """
    _check_floats(x)
    assert bits in (2, 4, 8), bits
    assert norms.dtype == _torch.float32 and norms.shape == (num_blocks(x.numel(), block),), norms.shape
    codes: _Tensor = _choose(x, norms).quantise(x, norms, block, bits, key)
    return codes


def dequantise(codes: _Tensor, norms: _Tensor, block: int, bits: int, out: _Tensor, add: bool = False) -> None:
    """Numbers of `quantise`: sign * level * (norm / s), both products in float32.

    Args:
        codes: packed.
        norms: float32, one for each block.
        bits: 2, 4 or 8.
        out: overwritten, or added to.

    Raises:
        ValueError: the codes or the norms are not as many as `out` needs.
    """
    _check_floats(out)
    assert bits in (2, 4, 8), bits
    _check_encoded(codes, bits, norms, (num_blocks(out.numel(), block),), out)
    _choose(out, codes, norms).dequantise(codes, norms, block, bits, out, add)


def encode_signs(kept: _Tensor, block: int, symmetric: bool = False) -> tuple[_Tensor, _Tensor]:
    """1-bit SGD: the sign of each element, and for each block the means of those >= 0 and of the others.

    `kept` becomes what that leaves: kept - decoded, in T.

    Args:
        symmetric: both means are that of |x|, with its sign.

    Returns:
        Bytes of 8 signs (1: at least 0), the first in the lowest bit; float32 means [2, blocks]: of those >= 0, of the
        others, 0 where there are none.
    """
    _check_floats(kept)
    assert block > 0, block
    encoded: tuple[_Tensor, _Tensor] = _choose(kept).encode_signs(kept, block, symmetric)
    return encoded


def decode_signs(codes: _Tensor, scales: _Tensor, block: int, out: _Tensor, add: bool = False) -> None:
    """Numbers of `encode_signs`.

    Args:
        codes: 8 signs in a byte.
        scales: float32 [2, blocks].
        out: overwritten, or added to.

    Raises:
        ValueError: the codes or the scales are not as many as `out` needs.
    """
    _check_floats(out)
    _check_encoded(codes, 1, scales, (2, num_blocks(out.numel(), block)), out)
    _choose(out, codes, scales).decode_signs(codes, scales, block, out, add)


def orthogonalise(matrix: _Tensor) -> None:
    """Gram and Schmidt, in place and in float64, column by column; a column of zeros stays one.

    Of a column that hangs on those before it only rounding errors are left, which are not orthogonal to them: so all is
    done twice, after which they are. Sums are made one number after the other, on all machines alike.

    Args:
        matrix: [rows, columns].
    """
    assert matrix.dtype in (_torch.float32, _torch.float64) and matrix.dim() == 2, (matrix.dtype, matrix.shape)
    _choose(matrix).orthogonalise(matrix)


def multiply_factors(left: _Tensor, right: _Tensor, out: _Tensor) -> None:
    """out = left right', every number of it the sum of its products in the order of columns, none of them fused: all
    machines have the same bits, on however many threads.

    Args:
        left: [rows, rank].
        right: [columns, rank].
        out: [rows * columns], overwritten.
    """
    _check_floats(out)
    assert left.dtype == right.dtype == out.dtype and left.shape[1] == right.shape[1] > 0, (left.shape, right.shape)
    assert out.numel() == left.shape[0] * right.shape[0], (left.shape, right.shape, out.shape)
    _choose(out, left).multiply_factors(left, right, out)


def _choose(*tensors: _Tensor | None) -> _ModuleType:
    """Machine code takes what lies in one piece in the memory of the CPU."""
    is_plain = all(one is None or (one.is_contiguous() and one.device.type == "cpu") for one in tensors)
    return _native if is_plain and _native.is_available() else _definition


def _check_floats(tensor: _Tensor, *others: _Tensor | None) -> None:
    assert tensor.dtype in (_torch.float32, _torch.float64) and tensor.dim() == 1, (tensor.dtype, tensor.shape)
    assert tensor.numel() < 2**31, tensor.numel()
    for other in others:
        assert other is None or (other.dtype == tensor.dtype and other.shape == tensor.shape), (tensor, other)


def _check_indices(indices: _Tensor) -> None:
    assert indices.dtype == _torch.int32 and indices.dim() == 1, (indices.dtype, indices.shape)


def _check_stream(indices: _Tensor, values: _Tensor) -> None:
    _check_indices(indices)
    _check_floats(values)
    if indices.shape != values.shape:
        raise ValueError(f"a sparse stream needs a value for each place ({indices.numel()}, {values.numel()})")


def _check_encoded(codes: _Tensor, bits: int, scales: _Tensor, shape: tuple[int, ...], out: _Tensor) -> None:
    assert codes.dtype == _torch.uint8 and scales.dtype == _torch.float32, (codes.dtype, scales.dtype)
    if codes.shape != (packed_size(out.numel(), bits),) or scales.shape != shape:
        raise ValueError(
            f"codes are of another size than the tensor (elements: {out.numel()}, bits: {bits}, "
            f"bytes: {codes.numel()}, scales: {tuple(scales.shape)}, wanted: {shape})"
        )
