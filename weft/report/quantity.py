"""Numbers as people read them: four significant digits, SI prefixes, one scale for all numbers of a row."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Scale", "format_duration", "format_plain", "format_quantity", "scale_of"]

SIGNIFICANT_DIGITS = 4
PREFIXES = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P"}
# The smallest and largest power of ten that a symbol takes a prefix for. Units that are words (samples, epochs) take
# none: "12,345 samples/s" reads better than "12.35 ksamples/s".
PREFIX_RANGE = {"s": (-9, 0), "B": (0, 15), "FLOP": (0, 15), "FLOP/s": (0, 15), "J": (-3, 9), "nat": (0, 0)}


@dataclass(frozen=True)
class Scale:
    """How the numbers of one row are written, so that they can be compared at a glance."""

    unit: str
    power: int  # of ten, taken out of every number
    decimals: int | None  # None: scientific notation

    def format(self, value: float) -> str:
        if not math.isfinite(value):
            return f"{value:g}"
        if self.decimals is None:
            return f"{value:.{SIGNIFICANT_DIGITS - 1}e}"
        return f"{value / 10**self.power:,.{self.decimals}f}"


def scale_of(values: Iterable[float], unit: str = "") -> Scale:
    """The scale at which the first finite, non-zero value has four significant digits.

    >>> scale = scale_of([0.01234, 0.0119], "s")
    >>> scale.format(0.01234), scale.format(0.0119), scale.unit
    ('12.34', '11.90', 'ms')
    >>> scale_of([0.98765]).format(0.98765), scale_of([12345.6], "samples/s").format(12345.6)
    ('0.9877', '12,346')
    """
    numbers = [value for value in values if math.isfinite(value)]
    reference = next((abs(value) for value in numbers if value), 0.0)
    if not reference:
        return Scale(unit, 0, 0)
    power = _prefix_power(reference, unit)
    magnitude = math.floor(math.log10(reference)) - power
    if not -4 <= magnitude <= 9:
        return Scale(unit, 0, None)
    whole = power == 0 and all(value == int(value) for value in numbers)
    decimals = 0 if whole else max(0, SIGNIFICANT_DIGITS - 1 - magnitude)
    return Scale(PREFIXES[power] + unit, power, decimals)


def format_plain(value: float) -> str:
    """A number on its own, without a unit.

    >>> format_plain(0.0712345), format_plain(float("inf"))
    ('0.07123', 'inf')
    """
    return scale_of([value]).format(value)


def format_quantity(value: float, unit: str) -> str:
    """A number on its own, with its unit.

    >>> format_quantity(0.01234, "s")
    '12.34 ms'
    """
    scale = scale_of([value], unit)
    return f"{scale.format(value)} {scale.unit}".rstrip()


def format_duration(seconds: float) -> str:
    """Minutes and seconds, hours when there are any; `-` when not known.

    >>> format_duration(75.2), format_duration(3725), format_duration(float("inf"))
    ('1:15', '1:02:05', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _prefix_power(reference: float, unit: str) -> int:
    lowest, highest = PREFIX_RANGE.get(unit, (0, 0))
    power = 3 * math.floor(math.log10(reference) / 3)
    return min(max(power, lowest), highest)
