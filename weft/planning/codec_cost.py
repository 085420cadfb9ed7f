"""The cost of codecs as data: what is sent instead of a message, what is kept back, and what encoding costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.errors import UsageError, nearest
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.specs.plan import Choice

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


def codec_cost(compress: Choice | str, num_bytes: float, element_bytes: int = 4) -> CodecCost:
    """Of a message of so many bytes, whose elements have `element_bytes` each, by the row of its compression.

    >>> codec_cost("bf16", 1000.0).sent_bytes
    500.0
    """
    choice = Choice(compress) if isinstance(compress, str) else compress
    rows = {name: value.cost for name, value in AXES["compress"].items() if value.cost}
    path = rows.get(str(replace(choice, parameters=())))
    if path is None:
        raise UsageError(f"cost of this compression is not known ({choice}); {nearest(str(choice), rows)}")
    formula: Callable[[Choice, float, int], CodecCost] = load(path)
    return formula(choice, num_bytes, element_bytes)


# Rows of the compression axis: functions of (choice, num_bytes, element_bytes).


def none(choice: Choice, num_bytes: float, element_bytes: int) -> CodecCost:
    return CodecCost(num_bytes)


def half(choice: Choice, num_bytes: float, element_bytes: int) -> CodecCost:
    """Two bytes an element; what has no more than that is sent as it is."""
    if element_bytes <= HALF_BYTES:
        return CodecCost(num_bytes)
    sent = num_bytes * HALF_BYTES / element_bytes
    return CodecCost(sent, touched_bytes=2 * (num_bytes + sent))
