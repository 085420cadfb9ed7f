"""A roofline drawn with characters, operators as letters on it."""

import math
from collections.abc import Mapping, Sequence

from weft.operators.bench import Placement
from weft.operators.roofline import Roofline

__all__ = ["draw_roofline"]

WIDTH, HEIGHT = 66, 16
LOWEST, HIGHEST = -5.0, 8.0  # powers of two of the intensity
TICK_STEP = 10


def draw_roofline(roofline: Roofline, points: Mapping[str, Placement], dtype: str = "float32") -> list[str]:
    """Lines of text: FLOP/s upwards and FLOP/B to the right, both in powers of two.

    Each memory's roof is drawn with the last character of its name (1, 2, 3, M), the peak with `=`, and each point
    with the first character of its label.
    """
    peak = roofline.peaks.get(dtype, roofline.peaks["float32"]).measured
    shown = {label: point for label, point in points.items() if point.flop_rate > 0}
    slowest = min(memory.bytes_per_second for memory in roofline.ceilings)
    rates = [slowest * 2**LOWEST, *(point.flop_rate for point in shown.values())]
    bottom, top = math.floor(math.log2(min(rates))), math.ceil(math.log2(peak) + 0.5)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]

    def put(intensity: float, rate: float, mark: str) -> None:
        column = round((math.log2(intensity) - LOWEST) / (HIGHEST - LOWEST) * (WIDTH - 1))
        row = round((math.log2(rate) - bottom) / (top - bottom) * (HEIGHT - 1))
        if 0 <= row < HEIGHT:
            grid[HEIGHT - 1 - row][min(max(column, 0), WIDTH - 1)] = mark

    for column in range(WIDTH):
        intensity = 2 ** (LOWEST + column / (WIDTH - 1) * (HIGHEST - LOWEST))
        put(intensity, peak, "=")
        for memory in roofline.ceilings:
            rate = intensity * memory.bytes_per_second
            if rate < peak:
                put(intensity, rate, memory.name[-1])
    for label, point in shown.items():
        put(point.intensity, point.flop_rate, label[0])
    return _framed(grid, bottom, top)


def _framed(grid: Sequence[Sequence[str]], bottom: float, top: float) -> list[str]:
    lines = []
    for row, cells in enumerate(grid):
        power = bottom + (HEIGHT - 1 - row) / (HEIGHT - 1) * (top - bottom)
        label = f"{2**power / 1e9:9.3g}" if row % 3 == 0 else " " * 9
        lines.append(f"{label} |{''.join(cells)}".rstrip())
    ticks = ""
    for column in range(0, WIDTH, TICK_STEP):
        intensity = 2 ** (LOWEST + column / (WIDTH - 1) * (HIGHEST - LOWEST))
        ticks = ticks.ljust(column) + f"{intensity:.2g}"
    return [
        f"{'GFLOP/s':>9}",
        *lines,
        f"{'':9} +{'-' * WIDTH}",
        f"{'':9}  {ticks}  FLOP/B",
    ]
