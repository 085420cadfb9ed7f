"""The cost of codecs as data: what is sent instead of a message, what is kept back, and what encoding costs."""

from dataclasses import dataclass

from weft.errors import UsageError, nearest

__all__ = ["CodecCost", "codec_cost"]

HALF_BYTES = 2


@dataclass(frozen=True)
class CodecCost:
    """Of one message.

    Args:
        sent_bytes: that a transport is handed.
        touched_bytes: that encoding and decoding read and write, together.
        memory_bytes: kept from one message to the next.
    """

    sent_bytes: float
    touched_bytes: float = 0.0
    memory_bytes: float = 0.0


def codec_cost(name: str, num_bytes: float, element_bytes: int = 4) -> CodecCost:
    """Of a message of so many bytes, whose elements have `element_bytes` each.

    >>> codec_cost("bf16", 1000.0).sent_bytes
    500.0
    """
    if name == "none":
        return CodecCost(num_bytes)
    if name in ("fp16", "bf16"):
        sent = num_bytes * HALF_BYTES / element_bytes
        return CodecCost(sent, touched_bytes=2 * (num_bytes + sent))
    raise UsageError(f"cost of this compression is not known ({name}); {nearest(name, ('none', 'fp16', 'bf16'))}")
