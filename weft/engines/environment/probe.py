"""A probe and its outcome: one thing that works here, is missing, or is broken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Check", "Probe", "Status", "run_probe"]

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Probe:
    """How to find out. `look` returns what was found; it raises ModuleNotFoundError or FileNotFoundError for what is
    not there, and anything else for what is there but does not work."""

    section: str
    name: str
    look: Callable[[], str]
    cure: str = ""
    required: bool = False  # Weft does not run without it


@dataclass(frozen=True)
class Check:
    """The finding of a probe. The cure is empty when all is well."""

    section: str
    name: str
    status: Status
    detail: str
    cure: str
    required: bool


def run_probe(probe: Probe) -> Check:
    """Never raises: an examination that ends at the first illness is of no use."""
    status, detail = _outcome(probe)
    cure = "" if status == "ok" else probe.cure
    return Check(probe.section, probe.name, status, detail, cure, probe.required)


def _outcome(probe: Probe) -> tuple[Status, str]:
    try:
        return "ok", probe.look()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        return "missing", _first_line(error)
    except Exception as error:
        return "broken", _first_line(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
