"""Energy that the processors use, from the counters that RAPL keeps under /sys/class/powercap.

    intel-rapl:0/           a package (AMD processors show up under the same name)
        name                package-0
        energy_uj           microjoules so far
        max_energy_range_uj where the counter starts again from zero
    intel-rapl:0:0/         a part of it, already counted
    intel-rapl-mmio:0/      the same package by another way, already counted
    intel-rapl:1/           name "psys": the whole board, packages included

Memory outside the package, GPUs and the rest of the machine are not counted, and whatever else runs on it is.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import final

__all__ = ["EnergyMeter", "start_energy_meter"]

POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Domain:
    """One package: its counter, and the range of that in microjoules."""

    counter: Path
    range: int

    def read(self) -> int:
        return int(self.counter.read_text())


@final
class EnergyMeter:
    """Joules since the meter was started.

    Update it at least every few minutes: a counter starts again from zero after some 20 minutes of full load, and one
    that did so twice between two updates looks as if it had done so once.
    """

    def __init__(self, domains: tuple[Domain, ...]) -> None:
        self._domains = domains
        self._last = [domain.read() for domain in domains]
        self.joules = 0.0

    def update(self) -> float:
        """Read the counters and return the joules so far; not a number once a counter can no longer be read."""
        try:
            now = [domain.read() for domain in self._domains]
        except (OSError, ValueError):
            self.joules = math.nan
            return self.joules
        self.joules += sum(map(joules_between, self._last, now, (domain.range for domain in self._domains)))
        self._last = now
        return self.joules


def start_energy_meter(root: Path = POWERCAP) -> tuple[EnergyMeter | None, str]:
    """A running meter over all packages, or None and the reason why energy cannot be read here."""
    try:
        domains = tuple(map(_open_domain, _find_packages(root)))
        if not domains:
            return None, f"no RAPL package found under {root}: a virtual machine, or a processor without it"
        return EnergyMeter(domains), ""
    except PermissionError as error:
        return None, f"only root may read {error.filename}; sudo chmod a+r {error.filename}"
    except (OSError, ValueError) as error:
        return None, f"RAPL counters could not be read: {error}"


def joules_between(before: int, after: int, counter_range: int) -> float:
    """Joules between two readings in microjoules, of a counter that may have started again from zero once.

    >>> joules_between(9_000_000, 1_000_000, counter_range=10_000_000)
    2.0
    """
    return (after - before + (counter_range if after < before else 0)) / 1e6


def _find_packages(root: Path) -> list[Path]:
    names = {folder: folder / "name" for folder in sorted(root.glob("intel-rapl:*")) if folder.name.count(":") == 1}
    return [folder for folder, name in names.items() if name.is_file() and name.read_text().startswith("package")]


def _open_domain(folder: Path) -> Domain:
    return Domain(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
