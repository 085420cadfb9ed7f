"""The whole examination: every probe, in the order in which the findings are shown."""

from collections.abc import Sequence

from weft.engines.environment import machine, packages, transports
from weft.engines.environment.probe import Check, Probe, run_probe

__all__ = ["check_environment", "check_extras", "is_fit"]

ALL_PROBES = (*machine.PROBES, *packages.REQUIRED, *transports.PROBES, *packages.EXTRAS)


def check_environment(probes: Sequence[Probe] = ALL_PROBES) -> list[Check]:
    """Check what works on this machine; each check has the cure where it fails."""
    return [run_probe(probe) for probe in probes]


def check_extras() -> list[Check]:
    """The packages that Weft can use and does not need."""
    return check_environment(packages.EXTRAS)


def is_fit(checks: Sequence[Check]) -> bool:
    """Whether everything works that Weft does not run without."""
    return all(check.status == "ok" for check in checks if check.required)
