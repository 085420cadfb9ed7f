"""The bytes of activations on the wire, by their format.

For the traffic of stages and split layers see placement_cost.py.

               bytes of n numbers
    none       as they are
    half       2 n
    8 bits     n, and 4 for every 2048 of them

Below 256 numbers a tensor travels as it is, and so does one that would not become smaller.
"""

from collections.abc import Callable

from weft.specs.loading import load
from weft.specs.plan import Choice, value_of

__all__ = ["activation_bytes", "is_added_by_group"]

LEAST = 256
"""Numbers of a tensor that is encoded."""

BLOCK, SCALE_BYTES, HALF_BYTES = 2048, 4, 2


def activation_bytes(activations: Choice | str, num_bytes: float, element_bytes: int = 4) -> float:
    """Of the message of a tensor of floats that has so many bytes, of `element_bytes` each.

    >>> [activation_bytes(name, 16384.0) for name in ("none", "bf16", "tree8")]
    [16384.0, 8192.0, 4104.0]
    """
    num_elements = num_bytes / element_bytes
    if num_elements < LEAST:
        return num_bytes
    return min(num_bytes, _formula(activations)(num_elements, element_bytes))


def is_added_by_group(activations: Choice | str) -> bool:
    """Whether messages can be added up: those of bytes and scales cannot."""
    return _formula(activations) is not eight_bit


def _formula(activations: Choice | str) -> Callable[[float, int], float]:
    choice = Choice(activations) if isinstance(activations, str) else activations
    found: Callable[[float, int], float] = load(value_of("activations", choice).cost)
    return found


# Rows of the axis `activations`: functions of (num_elements, element_bytes).


def exact(num_elements: float, element_bytes: int) -> float:
    return num_elements * element_bytes


def half(num_elements: float, element_bytes: int) -> float:
    return num_elements * HALF_BYTES


def eight_bit(num_elements: float, element_bytes: int) -> float:
    return num_elements + SCALE_BYTES * -(-num_elements // BLOCK)
