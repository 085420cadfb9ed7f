"""The device of a place: what a process must know of it before it computes, and the group that carries its tensors.

tensors on               carried by
cpu                      shared memory, MPI, Gloo (open_group.py)
cuda, a GPU each         NCCL, and beside it what carries those of the CPU
anything else            what carries those of the CPU, by way of host memory
"""

import hashlib
import logging
import os
from functools import cache

import torch
import torch.distributed as distributed

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.staged import StagedGroup
from weft.distributed.group.two_sided import TwoSidedGroup
from weft.distributed.place.launch import Launch
from weft.distributed.place.open_group import open_torch_group
from weft.distributed.place.topology import algorithm_of, with_topology
from weft.specs import Plan

__all__ = ["has_own_transport", "open_for_device", "prepare_device"]

_logger = logging.getLogger("weft")


def prepare_device(device: torch.device) -> None:
    """Have this process compute on a device: new streams and transports take it for theirs."""
    if device.type == "cuda":
        # cuBLAS keeps no promise of the same bits without it, and reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def open_for_device(launch: Launch, host: AbstractGroup, plan: Plan, device: torch.device) -> AbstractGroup:
    """The group that carries tensors of a device, with the plan's collectives, over one that carries those of the CPU.
    A collective call: ranks find out together which transport all of them have.

    An algorithm that the plan names is made of messages, which travel by way of the host; a collective is staged as a
    whole, once on its way in and once on its way out.
    """
    if launch.size == 1:
        return host
    has_own = _all_have_own_transport(host, device)
    if has_own and algorithm_of(plan) is None:
        own = open_torch_group(launch, backend="nccl", device=device, generation=host.generation)
        return TwoSidedGroup(StagedGroup(host, device), own)
    carried = with_topology(host, plan, launch.local_size)
    if device.type == "cpu":
        return carried
    if launch.rank == 0:
        _say_staged(device, _reason_for(device, has_own=has_own))
    return StagedGroup(carried, device)


def _reason_for(device: torch.device, *, has_own: bool) -> str:
    if has_own:
        return "the plan names an algorithm of messages"
    return "ranks share one" if has_own_transport(device) else "no transport for them is at hand"


@cache
def _say_staged(device: torch.device, reason: str) -> None:
    """Once in a process."""
    _logger.warning("tensors of %s travel between ranks by way of host memory: %s", device, reason)


def _all_have_own_transport(host: AbstractGroup, device: torch.device) -> bool:
    """Whether every rank can use NCCL; it takes a GPU for each."""
    has_own = has_own_transport(device)
    own = torch.tensor([[int(has_own), _number_of(device) if has_own else 0]])
    facts = torch.empty(host.size, 2, dtype=torch.int64)
    host.all_gather(facts, own)
    rows = [tuple(row) for row in facts.tolist()]
    return all(row[0] for row in rows) and len(set(rows)) == len(rows)


def has_own_transport(device: torch.device) -> bool:
    """Whether torch has a transport for the device that Weft knows how to open."""
    if device.type == "cpu" or not distributed.is_nccl_available():
        return False
    return distributed.get_default_backend_for_device(device) == "nccl"


def _number_of(device: torch.device) -> int:
    """The same for ranks that share a GPU, whatever each of them calls it: one that sees no other calls it 0."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:7], "big")
