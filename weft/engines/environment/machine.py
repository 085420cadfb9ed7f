"""The machine: Python, processor, memory, and a C++ compiler that compiles.

Modules that need torch are imported inside the probes: a torch that cannot be imported is a finding, not the end of the
examination.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.engines.environment.probe import Probe
from weft.errors import CompilerError

__all__ = ["NEEDS_GPU", "PROBES", "look_at_cuda"]

NEEDS_GPU = "needs an NVIDIA GPU with its driver, and a CUDA build of torch"

OLDEST_PYTHON = (3, 11)
# Docker gives /dev/shm 64 MB unless told otherwise, and a write beyond it kills the process with a bus error.
SMALLEST_SHARED_MEMORY = 128 * 2**20
SOURCE = """
template <typename T> T add(T a, T b) { return a + b; }
extern "C" int answer() { return add(40, 2); }
"""


def look_at_python() -> str:
    if sys.version_info < OLDEST_PYTHON:
        raise RuntimeError(f"{platform.python_version()} is older than {'.'.join(map(str, OLDEST_PYTHON))}")
    return f"{platform.python_version()} ({sys.executable})"


def look_at_processor() -> str:
    machine = _describe()
    return ", ".join([machine["cpu"], *machine["cpu_features"]])


def look_at_cores() -> str:
    usable, quota = _describe()["cores"], cpu_quota()
    limit = f", but the container may use the time of {quota:g}" if quota is not None and quota < usable else ""
    return f"{usable} usable of {os.cpu_count()}{limit}"


def look_at_memory() -> str:
    return _gigabytes(_describe()["memory_bytes"])


def look_at_devices() -> str:
    """The devices that `--device` can name, and what each accelerator calls itself where it says so."""
    import torch

    from weft.specs import list_devices

    def describe(name: str) -> str:
        own = getattr(torch.get_device_module(torch.device(name)), "get_device_name", None) if name != "cpu" else None
        return name if own is None else f"{name} ({own(torch.device(name))})"

    return ", ".join(map(describe, list_devices()))


def look_at_cuda() -> str:
    devices = _describe()["cuda_devices"]
    if not devices:
        raise FileNotFoundError("torch sees no CUDA device")
    return ", ".join(devices)


def look_at_shared_memory(folder: Path = Path("/dev/shm")) -> str:
    usage = shutil.disk_usage(folder)
    if usage.total < SMALLEST_SHARED_MEMORY:
        raise RuntimeError(f"{folder} holds only {usage.total / 1e6:.0f} MB")
    return f"{_gigabytes(usage.free)} free of {_gigabytes(usage.total)}"


def look_at_compiler() -> str:
    """Compile with the flags that Weft uses, load and call a function: a compiler without its linker is no compiler."""
    from weft.operators.compile import FLAGS

    compiler = _find_compiler()
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        source, library = Path(folder, "answer.cpp"), Path(folder, "answer.so")
        source.write_text(SOURCE)
        built = _run([compiler, *FLAGS, "-o", str(library), str(source)])
        if built.returncode != 0:
            raise RuntimeError(f"{compiler} failed: {built.stderr.strip() or built.returncode}")
        if ctypes.CDLL(str(library)).answer() != 42:
            raise RuntimeError(f"{compiler} made a library that gives wrong results")
    return _run([compiler, "--version"]).stdout.partition("\n")[0] or compiler


def look_at_energy() -> str:
    from weft.metrics.energy import start_energy_meter

    meter, reason = start_energy_meter()
    if meter is None:
        raise FileNotFoundError(reason)
    return "RAPL counters can be read"


def _find_compiler() -> str:
    from weft.operators.compile import find_compiler

    try:
        return find_compiler()
    except CompilerError as error:
        raise FileNotFoundError(str(error).partition(";")[0]) from None


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


def cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """How many cores' worth of time a container may use; None where there is no limit."""
    if not path.exists():
        return None
    quota, period = path.read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _describe() -> dict[str, Any]:
    from weft.records.machine import describe_machine

    return describe_machine()


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


PROBES = (
    Probe("machine", "python", look_at_python, "install Python 3.11 or newer", required=True),
    Probe("machine", "processor", look_at_processor),
    Probe("machine", "cores", look_at_cores),
    Probe("machine", "memory", look_at_memory),
    Probe("machine", "/dev/shm", look_at_shared_memory, "start the container with --shm-size=1g"),
    Probe("machine", "C++ compiler", look_at_compiler, "sudo apt-get install g++, or set CXX"),
    Probe("machine", "energy counter", look_at_energy),
    Probe("machine", "devices", look_at_devices),
    Probe("machine", "cuda", look_at_cuda, NEEDS_GPU),
)
