"""The group of all ranks that were started together: how they find each other, and over what they talk."""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as distributed

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.hierarchical import HierarchicalGroup
from weft.distributed.group.liveness import Store
from weft.distributed.group.mpi import MpiGroup, import_mpi
from weft.distributed.group.mpi import open_store as open_mpi_store
from weft.distributed.group.shared_memory import SharedMemoryGroup, StoreRendezvous
from weft.distributed.group.solo import SoloGroup
from weft.distributed.group.torch_group import TorchBackend, TorchGroup
from weft.distributed.place.interface import find_interface
from weft.distributed.place.launch import Launch
from weft.distributed.place.meeting import note_meeting
from weft.errors import UsageError, nearest
from weft.specs import CPU

__all__ = ["Kind", "open_group", "open_store", "open_torch_group", "open_world"]

Kind = Literal["auto", "solo", "shared_memory", "torch", "mpi", "hierarchical"]


_c10d: Any = distributed  # its type stubs lack the stores


def open_group(
    launch: Launch, kind: Kind = "auto", *, timeout: float = 300.0, generation: int = 0, name: str = ""
) -> AbstractGroup:
    """The group of all ranks of this run. A collective call: it returns when all have come.

    `auto` is shared memory where all ranks are on one host, MPI between hosts under mpirun, and else shared memory
    inside each host with Gloo between them. Sockets are bound to the loopback interface on one host, else to the one
    that `find_interface` finds.

    Args:
        timeout: seconds after which a silent peer counts as lost.
        generation: memberships that came before this one, for ranks that meet again.
        name: of one of several groups of the same ranks that are open at a time.

    >>> open_group(Launch("nobody")).size
    1
    """
    note_meeting()
    match kind if kind != "auto" else choose_kind(launch):
        case "solo":
            if launch.size > 1:
                raise UsageError(f"solo is for one rank (ranks: {launch.size}); choose another kind of group")
            return SoloGroup(generation=generation)
        case "shared_memory":
            return _open_in_memory(launch, timeout, generation, name)
        case "torch":
            return _open_over_torch(launch, timeout, generation, name)
        case "mpi":
            return _open_over_mpi(launch, timeout, generation)
        case "hierarchical":
            return _open_in_hosts(launch, timeout, generation, name)
        case _:
            raise UsageError(f"unknown kind of group (kind: {kind}); {nearest(kind, get_args(Kind))}")


def open_world(launch: Launch, num_ranks: int, timeout: float = 300.0, name: str = "world") -> AbstractGroup | None:
    """A group of the first `num_ranks` processes beside all others; None in a process that is not one of them. A
    collective call of all processes."""
    if num_ranks == launch.size:
        return open_group(launch, name=name, timeout=timeout)
    if launch.launcher == "mpirun" and not launch.is_one_host:
        raise UsageError("processes that are no ranks need one host under mpirun; leave out place=own, or use torchrun")
    if launch.rank < num_ranks:
        ranks = replace(launch, size=num_ranks, local_size=min(launch.local_size, num_ranks))
        return open_group(ranks, name=name, timeout=timeout)
    note_meeting()
    if launch.launcher == "mpirun":
        _open_run_store(launch, timeout, 0)  # all processes find a store together
    return None


def choose_kind(launch: Launch) -> Kind:
    """The fastest kind for ranks that were started so.

    >>> choose_kind(Launch("torchrun", rank=0, size=4, meeting="h:1", local_size=2))
    'hierarchical'
    """
    if launch.size == 1:
        return "solo"
    if launch.is_one_host:
        return "shared_memory"
    if launch.launcher == "mpirun":
        return "mpi"
    # Servers that are no ranks may leave a host with fewer ranks than the others have.
    return "hierarchical" if launch.local_size > 1 and launch.size % launch.local_size == 0 else "torch"


def _open_in_memory(launch: Launch, timeout: float, generation: int, name: str) -> AbstractGroup:
    if not launch.is_one_host:
        raise UsageError(
            f"shared memory joins ranks of one host (ranks: {launch.size}, here: {launch.local_size}); "
            "choose hierarchical, torch or mpi"
        )
    meeting: Path | StoreRendezvous
    if launch.launcher == "weft":
        meeting = Path(launch.meeting) / name
        meeting.mkdir(exist_ok=True)
    else:
        meeting = StoreRendezvous(_open_run_store(launch, timeout, generation, name))
    return SharedMemoryGroup(meeting, launch.rank, launch.size, timeout=timeout, generation=generation)


def _open_over_torch(launch: Launch, timeout: float, generation: int, name: str) -> TorchGroup:
    return open_torch_group(launch, timeout=timeout, generation=generation, name=name)


def open_torch_group(
    launch: Launch,
    *,
    backend: TorchBackend = "gloo",
    device: torch.device = CPU,
    timeout: float = 300.0,
    generation: int = 0,
    name: str = "",
) -> TorchGroup:
    """The group of all ranks over torch.distributed: Gloo for the CPU, NCCL for GPUs, each beside the other."""
    store = _open_run_store(launch, timeout, generation, name)
    return TorchGroup(
        store if backend == "gloo" else _c10d.PrefixStore(backend, store),
        launch.rank,
        launch.size,
        timeout=timeout,
        backend=backend,
        interface=find_interface(launch),
        generation=generation,
        device=device,
    )


def _open_over_mpi(launch: Launch, timeout: float, generation: int) -> AbstractGroup:
    if launch.launcher != "mpirun":
        raise UsageError(f"MPI needs ranks that mpirun started (started by: {launch.launcher}); use mpirun -n")
    return MpiGroup(timeout=timeout, generation=generation)


def _open_in_hosts(launch: Launch, timeout: float, generation: int, name: str) -> AbstractGroup:
    """Half of the timeout each: one of the two finds that a peer is silent, then the other finds out which."""
    row, column = divmod(launch.rank, launch.local_size)
    store = _open_run_store(launch, timeout, generation, name)
    meeting = StoreRendezvous(_c10d.PrefixStore(f"host/{row}", store))
    inside = SharedMemoryGroup(meeting, column, launch.local_size, timeout=timeout / 2, generation=generation)
    whole = TorchGroup(
        _c10d.PrefixStore("whole", store),
        launch.rank,
        launch.size,
        timeout=timeout / 2,
        interface=find_interface(launch),
        generation=generation,
    )
    return HierarchicalGroup(inside, whole)


def _open_run_store(launch: Launch, timeout: float, generation: int, name: str = "") -> Store:
    """Where the ranks of this place leave notes for each other."""
    match launch.launcher:
        case "weft":
            store = _c10d.FileStore(str(Path(launch.meeting) / "store"), launch.size)
        case "torchrun" | "hosts":
            store = _open_torchrun_store(launch, timeout)
        case "mpirun":
            store = open_mpi_store(import_mpi().COMM_WORLD, timeout, is_one_host=launch.is_one_host)
        case "nobody":
            store = _c10d.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    prefixed: Store = _c10d.PrefixStore(f"weft/{generation}", store)
    return _c10d.PrefixStore(name, prefixed) if name else prefixed


@cache
def _open_notes(launch: Launch, timeout: float) -> Any:
    return _c10d.PrefixStore("notes", _open_run_store(launch, timeout, 0))


def open_store(launch: Launch, timeout: float) -> Any:
    """A store of torch.distributed that all ranks of this place reach, for what is not a group's.

    A process may ask more often than another, whose addresses are fewer; but where mpirun started them, ranks find a
    store together. So each process finds one store, once, and every caller gets a client of its own.
    """
    return _open_notes(launch, timeout).clone()


def _open_torchrun_store(launch: Launch, timeout: float) -> Any:
    """The store of the user's own process group where there is one, else the launcher's, else one that rank 0 keeps."""
    # Ranks may have a process group that servers beside them have not: theirs is the launcher's store, for all.
    if launch.launcher == "torchrun" and _c10d.is_initialized():
        return _c10d.distributed_c10d._get_default_store()
    host, _, port = launch.meeting.rpartition(":")
    if launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return _keep_store(host, int(port)).clone()
    return _c10d.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)


@cache
def _keep_store(host: str, port: int) -> Any:
    """To the end of the process: there is one address for all groups and mailboxes of a run, and others may still be
    there when this rank has closed its own."""
    # Bound by hand to the one address: left to itself, the store listens on all interfaces.
    listener = socket.create_server((host, port)).detach()
    return _c10d.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
