"""The cost of codecs as data: what is sent instead of a message, what is kept back, and what encoding costs.

n elements of e bytes, w = 8 of float64 and 4 of all others:

    none                n e
    fp16, bf16          2 n
    qsgd(bits, block)   4 (n / block) + bits n / 8
    terngrad            4 a tensor, and n / 4
    onebit, sign        8 or 4 (n / block), and n / 8
    topk, dgc           k (w + 4), k = ratio n;  threshold: hangs on the values
    randomk             k w
    powersgd(r)         w r (rows + columns) of a matrix, in two messages; w n of what is smaller than that

Messages of bytes are padded to multiples of 8.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.errors import UsageError, nearest
from weft.specs.axes import AXES
from weft.specs.loading import load
from weft.specs.plan import Choice

__all__ = [
    "CodecCost",
    "Shape",
    "codec_cost",
    "is_low_rank",
    "num_selected",
    "num_ternary_bytes",
    "padded_bytes",
]

HALF_BYTES = 2
SCALE_BYTES = 4
PLACE_BYTES = 4
ALIGNED_BYTES = 8
"""Messages of bytes lie one after the other, and parts of them are read as numbers of up to so many bytes."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CodecCost:
    """Of one message.

    Args:
        sent_bytes: that a transport is handed. Not a number where it hangs on the values.
        touched_bytes: that encoding and decoding read and write, together.
        memory_bytes: kept from one message to the next.
        is_gathered: every rank gets the messages of all others, and adds them up itself; else the transport does.
        num_rounds: of messages, each of which waits for the one before.
    """

    sent_bytes: float
    touched_bytes: float = 0.0
    memory_bytes: float = 0.0
    is_gathered: bool = False
    num_rounds: int = 1


def codec_cost(
    compress: Choice | str, num_bytes: float, element_bytes: int = 4, shapes: Sequence[Shape] | None = None
) -> CodecCost:
    """Of a message of so many bytes, whose elements have `element_bytes` each, by the row of its compression.

    Args:
        compress: as a plan has it; parameters that are not given are as usual.
        num_bytes: of the message, not encoded.
        element_bytes: of a number of it.
        shapes: of the tensors in it; by default one, as near to a square as it gets.

    >>> codec_cost("bf16", 1000.0).sent_bytes, codec_cost("onebit", 4 * 4096.0).sent_bytes
    (500.0, 520)
    """
    choice = Choice(compress) if isinstance(compress, str) else compress
    rows = {name: value for name, value in AXES["compress"].items() if value.cost}
    name = str(replace(choice, parameters=()))
    row = rows.get(name)
    if row is None:
        raise UsageError(f"cost of this compression is not known ({choice}); {nearest(name, rows)}")
    given = replace(choice, parameters=tuple({**row.parameters, **dict(choice.parameters)}.items()))
    formula: Callable[[Choice, float, int, Sequence[Shape]], CodecCost] = load(row.cost)
    return formula(given, num_bytes, element_bytes, _square(num_bytes / element_bytes) if shapes is None else shapes)


def padded_bytes(num_bytes: float) -> int:
    """
    >>> padded_bytes(17)
    24
    """
    return math.ceil(num_bytes / ALIGNED_BYTES) * ALIGNED_BYTES


def num_selected(ratio: float, num_elements: int) -> int:
    """How many of so many elements are sent; one at least.

    >>> num_selected(0.01, 250), num_selected(0.01, 3), num_selected(0.01, 0)
    (3, 1, 0)
    """
    return min(num_elements, max(1, math.ceil(ratio * num_elements)))


def num_ternary_bytes(num_elements: int) -> int:
    """Of the codes of one tensor."""
    return -(-num_elements // 4)


def is_low_rank(shape: Shape, rank: int) -> bool:
    """Whether a tensor is sent as two factors: it is a matrix, all dims but the first being its columns, and larger
    than they are.

    >>> is_low_rank((64, 3, 3, 3), 4), is_low_rank((8, 8), 4), is_low_rank((100,), 4)
    (True, False, False)
    """
    if len(shape) < 2:
        return False
    rows, columns = shape[0], math.prod(shape[1:])
    return rows * columns > rank * (rows + columns)


def _square(num_elements: float) -> tuple[Shape, ...]:
    side = max(1, math.isqrt(round(num_elements)))
    rest = round(num_elements) - side * side
    return ((side, side), (rest,)) if rest else ((side, side),)


def _working_bytes(element_bytes: int) -> int:
    return 8 if element_bytes == 8 else 4


# Rows of the compression axis: functions of (choice, num_bytes, element_bytes, shapes).


def none(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    return CodecCost(num_bytes)


def factors(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """At most the gradients themselves; with the rows of a batch, `factored_cost` knows it better."""
    return CodecCost(num_bytes)


def half(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """Two bytes an element; what has no more than that is sent as it is."""
    if element_bytes <= HALF_BYTES:
        return CodecCost(num_bytes)
    sent = num_bytes * HALF_BYTES / element_bytes
    return CodecCost(sent, touched_bytes=2 * (num_bytes + sent))


def quantised(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """Read for the norms, read and written for the codes."""
    num_elements = num_bytes / element_bytes
    norms = SCALE_BYTES * math.ceil(num_elements / float(choice["block"]))
    sent = padded_bytes(norms + math.ceil(num_elements * float(choice["bits"]) / 8))
    return CodecCost(sent, touched_bytes=3 * num_bytes + 2 * sent, is_gathered=True)


def ternary(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    sent = padded_bytes(sum(SCALE_BYTES + num_ternary_bytes(math.prod(shape)) for shape in shapes))
    return CodecCost(sent, touched_bytes=4 * num_bytes + 2 * sent, is_gathered=True)


def signs(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """With two scales for every block."""
    return _signs(choice, num_bytes, element_bytes, shapes, scales=2)


def symmetric_signs(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    return _signs(choice, num_bytes, element_bytes, shapes, scales=1)


def _signs(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape], *, scales: int) -> CodecCost:
    """The residual is read and written twice: with the message added, and with what was sent taken away. Blocks and
    bytes end with their tensor."""
    kept, block = num_bytes / element_bytes * _working_bytes(element_bytes), int(choice["block"])
    sizes = [math.prod(shape) for shape in shapes]
    num_scales, num_codes = sum(scales * -(-size // block) for size in sizes), sum(-(-size // 8) for size in sizes)
    sent = padded_bytes(SCALE_BYTES * num_scales + num_codes)
    return CodecCost(sent, 2 * num_bytes + 4 * kept + 2 * sent, kept, is_gathered=True)


def selected(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """The residual is read and written in one pass, with the message added; the sum is filled with zeros. Momentum,
    where ranks keep it, is as much again."""
    num_elements, working = num_bytes / element_bytes, _working_bytes(element_bytes)
    kept = num_elements * working
    count = num_selected(float(choice["ratio"]), round(num_elements))
    is_known = choice.get("select", "exact") == "exact"
    sent = padded_bytes(count * (working + PLACE_BYTES)) if is_known else math.nan
    copies = 2 if "warmup" in dict(choice.parameters) else 1
    touched = 2 * num_bytes + 2 * copies * kept
    return CodecCost(sent, touched, copies * kept, is_gathered=True, num_rounds=1 if is_known else 2)


def above(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """How much is sent hangs on the gradients."""
    kept = num_bytes / element_bytes * _working_bytes(element_bytes)
    return CodecCost(math.nan, 2 * num_bytes + 2 * kept, kept, is_gathered=True, num_rounds=2)


def drawn(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    num_elements, working = num_bytes / element_bytes, _working_bytes(element_bytes)
    sent = num_selected(float(choice["ratio"]), round(num_elements)) * working
    return CodecCost(sent, 2 * num_bytes + 2 * num_elements * working, num_elements * working)


def factored(choice: Choice, num_bytes: float, element_bytes: int, shapes: Sequence[Shape]) -> CodecCost:
    """Both factors together; what is kept is read and written twice, and read twice more."""
    rank, working = int(choice["rank"]), _working_bytes(element_bytes)
    kept = num_bytes / element_bytes * working
    sent, rights = 0, 0
    for shape in shapes:
        rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
        sent += rank * (rows + columns) if is_low_rank(shape, rank) else math.prod(shape)
        rights += rank * columns if is_low_rank(shape, rank) else 0
    return CodecCost(sent * working, 2 * num_bytes + 6 * kept, kept + rights * working, num_rounds=2)
