"""Which gradients travel together: small ones packed, large ones alone and in place.

parameters, in the order of the model      w1 (4 MB)  b1  w2 (4 MB)  b2  w3 (40 kB)  b3
buckets, in the order backward fills them  [b3 w3 b2]  [w2]  [b1]  [w1]
                                           packed      alone, never copied
"""

from collections.abc import Callable, Hashable, Mapping

from torch import Tensor

from weft.distributed.codecs.packing import Bucket, bucket_of

__all__ = ["plan_buckets"]

PACKED_BYTES = 1 << 20
"""A packed bucket is sent when it is about this full: latency shows in smaller ones, larger ones overlap less."""


def plan_buckets(
    parameters: Mapping[str, Tensor],
    packed_bytes: int = PACKED_BYTES,
    key: Callable[[str], Hashable] = lambda name: None,
) -> tuple[Bucket, ...]:
    """Every parameter in exactly one bucket, last parameter first; tensors of a packed bucket share a type.

    Args:
        key: of a name; parameters with different keys do not travel together.
    """
    buckets: list[Bucket] = []
    packing: dict[str, Tensor] = {}

    def close() -> None:
        if packing:
            buckets.append(bucket_of(packing))
            packing.clear()

    for name, parameter in reversed(list(parameters.items())):
        if any(p.dtype != parameter.dtype or key(other) != key(name) for other, p in packing.items()):
            close()
        if parameter.nbytes >= packed_bytes:
            close()
            buckets.append(bucket_of({name: parameter}))
            continue
        packing[name] = parameter
        if sum(p.nbytes for p in packing.values()) >= packed_bytes:
            close()
    close()
    return tuple(buckets)
