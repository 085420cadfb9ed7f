"""The data caches of this machine, as Linux tells of them."""

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cache", "read_caches"]

CPU = Path("/sys/devices/system/cpu/cpu0")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Cache:
    """One level; `num_sharers` processors share its bytes."""

    level: int
    num_bytes: int
    num_sharers: int

    def share_of(self, num_threads: int) -> int:
        """Bytes for each of some threads that run on processors of their own."""
        return self.num_bytes // min(self.num_sharers, num_threads)

    def total_of(self, num_threads: int) -> int:
        """Bytes that the threads have together."""
        return self.share_of(num_threads) * num_threads


def read_caches(cpu: Path = CPU) -> tuple[Cache, ...]:
    """Data and unified caches of the first processor, nearest first; empty where the system says nothing."""
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
