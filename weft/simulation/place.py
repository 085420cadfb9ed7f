"""A place on the virtual cluster: every worker and every server is a virtual rank, in virtual time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, final

import torch

from weft.distributed.group.clock import VirtualTimes
from weft.distributed.group.faulty import Fault, Kill
from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.staged import StagedGroup
from weft.distributed.mailbox import AbstractMailbox, FaultyMailbox, VirtualMailbox
from weft.distributed.place import AbstractPlace
from weft.distributed.virtual import die
from weft.errors import PeerLostError
from weft.planning.network import NetworkModel
from weft.simulation.computation import ChargingOptimizer, ComputeModel
from weft.specs import CPU, Plan
from weft.training.optimizers import AbstractOptimizer

__all__ = ["TIMEOUT_SECONDS", "VirtualPlace", "with_host_servers"]

# A rank may well compute for minutes; that a peer is lost is not what this simulates.
TIMEOUT_SECONDS = 1e6

PROBE_SECONDS = 1e-3
"""Of a computation by which ranks find out how fast they are."""


@final
class VirtualPlace(AbstractPlace):
    """One virtual rank.

    Args:
        group: all virtual ranks, in the order of a plan's addresses.
        faults: what befalls the processes of the plan; an address dies with its process.
        compute: what updates cost.
        shared: one dictionary for all ranks of the cluster.
        device: the one that all ranks compute on; to bring tensors to the host and back takes no virtual time.
        slowness: how many times as long as usual this rank takes for a step, by its number.
    """

    def __init__(
        self,
        group: AbstractGroup,
        faults: Sequence[Fault],
        compute: ComputeModel,
        shared: dict[str, Any],
        device: torch.device = CPU,
        slowness: Callable[[int], float] = lambda _step: 1.0,
    ) -> None:
        super().__init__(shared, device)
        self._group = group
        self._faults = faults
        self._compute = compute
        self._slowness = slowness

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def patience(self) -> float:
        return TIMEOUT_SECONDS

    @property
    def snapshots(self) -> Path | None:
        return None

    def size_for(self, plan: Plan) -> int:
        return plan.roles.num_addresses

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        return (self.rank,)

    def open_group(self, plan: Plan) -> AbstractGroup:
        """The virtual group has the plan's all-reduce already: in it a collective advances while the rank computes."""
        return self._group if self.device.type == "cpu" else StagedGroup(self._group, self.device)

    def open_world(self, num_ranks: int) -> AbstractGroup | None:
        own = self._group.split(int(self.rank >= num_ranks), self.rank)
        return own if self.rank < num_ranks else None

    def open_ranks(self, plan: Plan) -> AbstractGroup | None:
        ranks = self.open_world(plan.num_ranks)
        return ranks if ranks is None or self.device.type == "cpu" else StagedGroup(ranks, self.device)

    def open_notes(self) -> None:
        return None

    def open_mailbox(self, plan: Plan, address: int) -> AbstractMailbox:
        """One that ends with the process that its address shares."""
        roles = plan.roles
        process = roles.process_of(address)
        if process == address:
            own = list(self._faults)
        else:
            deaths = [fault for fault in self._faults if fault.rank == process and isinstance(fault, Kill)]
            own = [replace(death, rank=address) for death in deaths]
        is_survived = process in roles.expendable | roles.restored
        end = die if is_survived else partial(_end_run, process, roles.names[process])
        return FaultyMailbox(VirtualMailbox(self._group), own, die=end)

    def charge_updates(self, optimizer: AbstractOptimizer, fraction: float) -> AbstractOptimizer:
        seconds = self._compute.seconds_per_update * fraction
        return ChargingOptimizer(optimizer, replace(self._compute, seconds_per_update=seconds), self._group.clock)

    @property
    def times(self) -> VirtualTimes:
        """Layers take what they are charged, and a probe as long as one of the first steps makes it."""
        steps = count()

        def probe() -> None:
            self._group.clock.charge(PROBE_SECONDS * self._slowness(next(steps)))

        return VirtualTimes(self._compute.share_of if self._compute.ready else None, probe)

    def mark_joined(self) -> None:
        """Nobody waits to hear it."""


def _end_run(rank: int, role: str) -> NoReturn:
    """End the run, as whoever started the processes would, when one dies that no other can stand in for."""
    raise PeerLostError(f"rank {rank} is lost, and the run with it (rank {rank} was {role}); start again", rank)


def with_host_servers(network: NetworkModel, plan: Plan) -> NetworkModel:
    """The network, with every host server on the host of its first worker."""
    if not network.ranks_per_host:
        return network
    first = plan.roles.num_addresses - plan.num_hosts
    host_overrides = tuple(
        (first + host, network.host_of(host * plan.ranks_per_host)) for host in range(plan.num_hosts)
    )
    return replace(network, host_overrides=host_overrides)
