"""Another unit for gradients that wait to be sent, after the scale of those that come has changed."""

from weft.distributed.codecs.codec import AbstractCodec

__all__ = ["rescale_unsent"]


def rescale_unsent(codec: AbstractCodec, factor: float) -> None:
    """Multiply what was not sent; exact where the factor is a power of two. What all ranks have alike stays."""
    kept = codec.memory()
    codec.remember({n: one.tensor * factor if one.kind == "sum" else one.tensor for n, one in kept.items()})
