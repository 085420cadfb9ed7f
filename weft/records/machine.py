"""The machine, the software and the source that a number was made with."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_machine", "describe_source", "describe_versions"]

PACKAGE = Path(__file__).resolve().parents[1]

# The instruction sets that decide how fast matrix products run, as /proc/cpuinfo spells them on x86 and on ARM.
CPU_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "asimd",
    "bf16",
    "sve",
)


def describe_machine(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> dict[str, Any]:
    """The facts by which a time is judged: processor, cores, memory, threads, devices.

    Host and user names are left out, so that a record can be published. What cannot be read is an empty text or zero.
    """
    processor = _fields(proc / "cpuinfo")
    flags = set((processor.get("flags") or processor.get("Features") or "").split())
    governor = sys / "devices/system/cpu/cpu0/cpufreq/scaling_governor"
    return {
        "cpu": processor.get("model name") or platform.processor() or platform.machine(),
        "cpu_features": [feature for feature in CPU_FEATURES if feature in flags],
        "cores": _usable_cores(),
        "governor": _read(governor).strip(),
        "memory_bytes": _kibibytes(_fields(proc / "meminfo").get("MemTotal", "")) * 1024,
        "torch_threads": torch.get_num_threads(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of every package that can change a result."""
    packages = ("torch", "numpy", "scipy", "weft")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def describe_source(package: Path = PACKAGE) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that `package` lies at the top of; empty when there is none.

    A package installed into the environment of some other project does not count: that project's commit says nothing
    about this code.
    """
    checkout = package.parent
    if not (checkout / ".git").exists():
        return {}
    commit = _git(checkout, "rev-parse", "HEAD")
    changes = _git(checkout, "status", "--porcelain")
    return {} if commit is None or changes is None else {"commit": commit.strip(), "dirty": bool(changes)}


def _git(checkout: Path, *arguments: str) -> str | None:
    # Inside a git hook GIT_DIR and its like point elsewhere; a lock would disturb a git that the user runs.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fields(file: Path) -> dict[str, str]:
    """The `name: value` lines of a /proc file; of names that come more than once, the first."""
    fields: dict[str, str] = {}
    for line in _read(file).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _kibibytes(text: str) -> int:
    number = text.removesuffix("kB").strip()
    return int(number) if number.isdigit() else 0


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
