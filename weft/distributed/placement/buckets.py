"""Which gradients travel together: small ones packed, large ones alone and in place.

parameters, in the order of the model      w1 (4 MB)  b1  w2 (4 MB)  b2  w3 (40 kB)  b3
buckets, in the order backward fills them  [b3 w3 b2]  [w2]  [b1]  [w1]
                                           packed      alone, never copied
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Bucket", "plan_buckets"]

PACKED_BYTES = 1 << 20
"""A packed bucket is sent when it is about this full: latency shows in smaller ones, larger ones overlap less."""


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel as one message. A bucket of one needs no packing."""

    names: tuple[str, ...]
    num_elements: int


def plan_buckets(parameters: Mapping[str, Tensor], packed_bytes: int = PACKED_BYTES) -> tuple[Bucket, ...]:
    """Every parameter in exactly one bucket, last parameter first; tensors of a packed bucket share a type."""
    buckets: list[Bucket] = []
    packing: list[tuple[str, Tensor]] = []

    def close() -> None:
        if packing:
            buckets.append(Bucket(tuple(name for name, _ in packing), sum(p.numel() for _, p in packing)))
            packing.clear()

    for name, parameter in reversed(list(parameters.items())):
        if packing and packing[-1][1].dtype != parameter.dtype:
            close()
        if _num_bytes([parameter]) >= packed_bytes:
            close()
            buckets.append(Bucket((name,), parameter.numel()))
            continue
        packing.append((name, parameter))
        if _num_bytes([p for _, p in packing]) >= packed_bytes:
            close()
    close()
    return tuple(buckets)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
