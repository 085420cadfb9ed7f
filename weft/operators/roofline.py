"""The roofline of this machine: the speed that an operator can reach, by its operations per byte and its memory.

Ceilings are measured: bytes a second are the better of a reading and a triad kernel on data of half the cache's size,
operations a second those of independent fused multiply-adds. The nominal peak stands beside the measured one:
frequency x lanes of a vector x 2 x multiply-adds per cycle, with two units assumed, as in most processors since 2013.
"""

import ctypes
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from weft.errors import UsageError
from weft.operators.compile import compile_library
from weft.operators.cpp import CPP_FLAGS

__all__ = ["Cache", "Ceiling", "Peak", "Roofline", "measure_roofline", "read_caches"]

SOURCE = Path(__file__).with_name("roofline.cpp")
FMA_PER_CYCLE = 2
KERNELS = {"read": 0, "triad": 1}
DRAM_BYTES = 2**26  # at least; four times the last cache where that is more
CPU = Path("/sys/devices/system/cpu/cpu0")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
SECONDS = 0.05  # for each kernel on each level


@dataclass(frozen=True)
class Cache:
    """One level of the data caches; `num_sharers` processors share its bytes."""

    level: int
    num_bytes: int
    num_sharers: int

    def share_of(self, num_threads: int) -> int:
        """Bytes for each of some threads that run on processors of their own."""
        return self.num_bytes // min(self.num_sharers, num_threads)

    def total_of(self, num_threads: int) -> int:
        """Bytes that the threads have together."""
        return self.share_of(num_threads) * num_threads


@dataclass(frozen=True)
class Ceiling:
    """One memory: how much it holds for all threads together (None: without limit), and how fast it is."""

    name: str
    num_bytes: int | None
    bytes_per_second: float


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one type, measured, and from frequency x width x instructions per cycle (None: frequency not known)."""

    measured: float
    nominal: float | None


@dataclass(frozen=True)
class Roofline:
    """The ceilings, nearest memory first, for a number of threads."""

    num_threads: int
    frequency: float | None  # Hz
    vector_bytes: int
    ceilings: tuple[Ceiling, ...]
    peaks: Mapping[str, Peak]  # by the name of the type: float32, float64

    def memory_of(self, num_bytes: int) -> Ceiling:
        """The nearest memory that holds so much."""
        return next(c for c in self.ceilings if c.num_bytes is None or num_bytes <= c.num_bytes)

    def peak_of(self, dtype: torch.dtype) -> float:
        """FLOP/s; types that were not measured count as float32."""
        return self.peaks.get(str(dtype).removeprefix("torch."), self.peaks["float32"]).measured

    def attainable(self, intensity: float, memory: Ceiling, dtype: torch.dtype = torch.float32) -> float:
        """FLOP/s under the roof at so many operations per byte."""
        return min(self.peak_of(dtype), intensity * memory.bytes_per_second)


@cache
def measure_roofline(num_threads: int = 1) -> Roofline:
    """Measure the roofline of this machine, in about a second; once per process and number of threads.

    Raises:
        UsageError: fewer than one thread.
        CompilerError: there is no C++ compiler.
    """
    if num_threads < 1:
        raise UsageError(f"a roofline needs threads ({num_threads}); give 1 or more")
    library = _load()
    frequency = float(library.frequency(SECONDS)) or None
    width = int(library.vector_bytes())
    peaks = {}
    for name, is_double, size in (("float32", 0, 4), ("float64", 1, 8)):
        measured = float(library.peak_rate(is_double, num_threads, SECONDS))
        peaks[name] = Peak(measured, _nominal(frequency, width // size, num_threads))
    caches = read_caches()
    ceilings = [_measure_cache(library, level, num_threads) for level in caches]
    return Roofline(num_threads, frequency, width, (*ceilings, _measure_dram(library, caches, num_threads)), peaks)


def _nominal(frequency: float | None, num_lanes: int, num_threads: int) -> float | None:
    return None if frequency is None else frequency * num_lanes * 2 * FMA_PER_CYCLE * num_threads


def _measure_cache(library: ctypes.CDLL, level: Cache, num_threads: int) -> Ceiling:
    rate = _stream_rate(library, level.share_of(num_threads) // 2, num_threads)
    return Ceiling(f"L{level.level}", level.total_of(num_threads), rate)


def _measure_dram(library: ctypes.CDLL, caches: tuple[Cache, ...], num_threads: int) -> Ceiling:
    total = max([DRAM_BYTES, *(4 * level.num_bytes for level in caches)])
    return Ceiling("DRAM", None, _stream_rate(library, total // num_threads, num_threads))


def _stream_rate(library: ctypes.CDLL, num_bytes: int, num_threads: int) -> float:
    return max(float(library.stream_rate(kind, num_bytes, num_threads, SECONDS)) for kind in KERNELS.values())


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(str(compile_library([SOURCE], flags=CPP_FLAGS)))
    library.frequency.argtypes = [ctypes.c_double]
    library.stream_rate.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_double]
    library.peak_rate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    for function in (library.frequency, library.stream_rate, library.peak_rate):
        function.restype = ctypes.c_double
    return library


def read_caches(cpu: Path = CPU) -> tuple[Cache, ...]:
    """Data and unified caches of the first processor, as Linux tells of them, nearest first; empty elsewhere."""
    caches = []
    for folder in sorted((cpu / "cache").glob("index*")):
        if _read(folder / "type") not in ("Data", "Unified"):
            continue
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(folder / "size"))
        level = _read(folder / "level")
        if size and level.isdigit():
            sharers = _count_processors(_read(folder / "shared_cpu_list"))
            caches.append(Cache(int(level), int(size[1]) * UNITS[size[2]], sharers))
    return tuple(sorted(caches, key=lambda cache: cache.level))


def _count_processors(text: str) -> int:
    """The number of processors in a list such as `0-3,8`; 1 where it cannot be read."""
    ranges = [part.split("-") for part in text.split(",") if re.fullmatch(r"\d+(-\d+)?", part)]
    return max(sum(int(ends[-1]) - int(ends[0]) + 1 for ends in ranges), 1)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
