"""Batches cut along the dim that counts their samples: a tensor, or dicts, lists and tuples of tensors.

A list of numbers or texts is a column, with one for each sample:

    {"ids": (6, 9), "names": ["a", ..., "f"]}   ->   {"ids": (2, 9), "names": ["c", "d"]}
"""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from weft.distributed.group.dense import as_bytes
from weft.distributed.script.calls.trees import as_json, outline_of
from weft.errors import UsageError
from weft.training.sampling import span, span_by_speed

__all__ = ["cut", "digest_of", "few_of", "num_samples", "part_of"]

FEW = 2
"""Samples that stand in for a batch: batch norm cannot do with one."""

PLAIN = (bool, int, float, str, bytes)
LOOKED_AT = 64
"""Elements of a tensor that make up its digest."""


def num_samples(batch: Any, dim: int = 0) -> int:
    """How many samples all parts of a batch have."""
    sizes = _sizes(batch, dim)
    if not sizes:
        raise UsageError("batch has no tensor to share; give tensors with a dim for samples")
    if len(set(sizes)) > 1:
        raise UsageError(
            f"parts of a batch differ in how many samples they have (dim: {dim}, sizes: {sizes}); "
            "share those of one size together, each kind along its own dim"
        )
    return sizes[0]


def part_of(length: int, rank: int, num_ranks: int, speeds: Sequence[int] | None = None) -> tuple[slice, int]:
    """The samples that a rank takes of so many, and how many they are. Where none are left for it, it takes the first,
    which counts as none: every rank makes the same steps.

    Args:
        speeds: of all, where shares are dealt by these; by default they are equal.

    >>> [part_of(2, rank, 3) for rank in range(3)]
    [(slice(0, 1, None), 1), (slice(1, 2, None), 1), (slice(0, 1, None), 0)]
    """
    own = span_by_speed(length, rank, speeds) if speeds else span(length, rank, num_ranks)
    count = own.stop - own.start
    return (own if count else slice(0, 1)), count


def cut(batch: Any, own: slice, dim: int = 0) -> Any:
    """These samples of a batch."""
    match batch:
        case Tensor():
            return batch.narrow(dim, own.start, min(own.stop, batch.shape[dim]) - own.start)
        case np.ndarray():
            return batch[(slice(None),) * (dim % batch.ndim) + (own,)]
        case dict():
            return {key: cut(item, own, dim) for key, item in batch.items()}
        case list() | tuple():
            if _is_column(batch):
                return batch[own]
            return _like(batch, [cut(item, own, dim) for item in batch])
        case _:
            return batch


def few_of(batch: Any, count: int) -> Any:
    """A few of so many samples, of a batch that counts for nothing; all of one that shows no dim for them.

    >>> few_of(["a", "b", "c"], 3)
    ['a', 'b']
    """
    try:
        is_cut = count == num_samples(batch) and not _may_be_a_list_of_samples(batch, count)
    except UsageError:
        return batch
    return cut(batch, slice(0, min(FEW, count))) if is_cut else batch


def _may_be_a_list_of_samples(batch: Any, count: int) -> bool:
    """As of images that differ in size: then their first dim counts channels."""
    match batch:
        case dict():
            return any(_may_be_a_list_of_samples(item, count) for item in batch.values())
        case list() | tuple() if not _is_column(batch):
            return len(batch) == count or any(_may_be_a_list_of_samples(item, count) for item in batch)
        case _:
            return False


def _like(batch: Any, items: list[Any]) -> Any:
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def _is_column(batch: Any) -> bool:
    return bool(batch) and isinstance(batch[0], PLAIN) and all(isinstance(item, PLAIN) for item in batch)


def _sizes(batch: Any, dim: int) -> list[int]:
    match batch:
        case Tensor() | np.ndarray():
            if not -batch.ndim <= dim < batch.ndim:
                raise UsageError(
                    f"tensor has no dim to share along (dim: {dim}, shape: {tuple(batch.shape)}); name another, "
                    "or leave the tensor out"
                )
            return [batch.shape[dim]]
        case dict():
            return [size for item in batch.values() for size in _sizes(item, dim)]
        case list() | tuple():
            return [len(batch)] if _is_column(batch) else [size for item in batch for size in _sizes(item, dim)]
        case None:
            return []
        case _:
            raise UsageError(
                f"batch cannot be cut into shares (it holds: {type(batch).__name__}); "
                "give tensors, and dicts, lists or tuples of them"
            )


def digest_of(value: Any) -> int:
    """A number that differs, most likely, where two values do; 0 of values that cannot be looked into."""
    try:
        outline, tensors = outline_of(value)
    except UsageError:
        return 0
    digest = zlib.crc32(as_json(outline))
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // LOOKED_AT)].cpu().contiguous()
        digest = zlib.crc32(as_bytes(some).numpy().tobytes(), digest)
    return digest
