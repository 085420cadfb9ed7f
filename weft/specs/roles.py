"""The roles of a plan: who answers at which address, and which of them share a process.

data=2 consistency=async topology=server(shards=2)            process 0: worker 0, server 0      addresses 0, 2
                                                              process 1: worker 1, server 1      addresses 1, 3
data=2 consistency=async topology=server(2,place=own)         process 0, 1: workers    process 2, 3: servers
data=4 consistency=async topology=server(1,inner=2)           process 0: worker 0, server 0, host server 0
                                                              process 2: worker 2, host server 1
data=2 consistency=gossip(ring,mix=pair)                      process 0: worker 0, responder 0   addresses 0, 2
data=2 pipeline=2 consistency=async topology=server           process 0: worker 0, server 0      addresses 0, 4
                                                              process 2: worker 2, server 1      addresses 2, 5

Workers have the addresses of their ranks. Servers come after them, then host servers; or a responder for every rank.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Channel", "RoleKind", "Roles", "assign_roles"]

Channel = Literal["all_reduce", "servers", "neighbours"]
"""How ranks reach each other: in a group of all, through servers, or each its neighbours alone."""

RoleKind = Literal["worker", "server", "host server", "responder"]


@dataclass(frozen=True)
class Roles:
    """`kinds[a]` is what address `a` is for, `processes[p]` are the addresses in process `p`.

    >>> assign_roles(2, "servers", holders=(0,), is_own=True).names
    ('worker', 'worker', 'server 0')
    >>> assign_roles(3, "servers", holders=(0,), num_hosts=2, ranks_per_host=2).names
    ('worker, server 0, host server 0', 'worker', 'worker, host server 1')
    """

    kinds: tuple[RoleKind, ...]
    processes: tuple[tuple[int, ...], ...]
    is_strict: bool = False  # nobody can be done without
    ranks_per_replica: int = 1  # of which none can do without the others

    @property
    def num_workers(self) -> int:
        return self.kinds.count("worker")

    @property
    def names(self) -> tuple[str, ...]:
        """The roles of each process, in words."""
        return tuple(", ".join(filter(None, map(self._name, addresses))) for addresses in self.processes)

    @property
    def num_processes(self) -> int:
        return len(self.processes)

    @property
    def num_addresses(self) -> int:
        return len(self.kinds)

    def process_of(self, address: int) -> int:
        return next(process for process, addresses in enumerate(self.processes) if address in addresses)

    @property
    def expendable(self) -> frozenset[int]:
        """Processes that the others can do without: ranks that go at their own pace and are no servers. Rank 0 keeps
        the record; of a replica of several ranks, none can be done without by the rest of it."""
        if self.is_strict or self.ranks_per_replica > 1 or len(self.kinds) == self.num_workers:
            return frozenset()
        alone = (i for i, own in enumerate(self.processes) if {self.kinds[a] for a in own} <= {"worker", "responder"})
        return frozenset(alone) - {0}

    @property
    def restored(self) -> frozenset[int]:
        """Processes that are started again where they were lost: servers that are no ranks."""
        if self.is_strict:
            return frozenset()
        own = (i for i, addresses in enumerate(self.processes) if self.kinds[addresses[0]] != "worker")
        return frozenset(own)

    def _name(self, address: int) -> str:
        kind = self.kinds[address]
        return {"worker": "worker", "responder": ""}.get(kind, f"{kind} {address - self.kinds.index(kind)}")


def assign_roles(
    num_ranks: int,
    channel: Channel,
    *,
    holders: tuple[int, ...] = (),
    num_hosts: int = 0,
    ranks_per_host: int = 1,
    is_own: bool = False,
    is_strict: bool = False,
    ranks_per_replica: int = 1,
) -> Roles:
    """Who is where.

    Args:
        holders: of every server, the rank whose process it shares, unless it has its own.
        num_hosts: host servers, one for `ranks_per_host` ranks each.
        is_own: servers are processes of their own.
        is_strict: a run ends with any of its processes, because ranks meet in every step.
    """
    ranks = range(num_ranks)
    workers = _repeat("worker", num_ranks)
    if channel == "neighbours":
        return Roles(workers + _repeat("responder", num_ranks), tuple((rank, num_ranks + rank) for rank in ranks))
    if channel == "all_reduce":
        return Roles(workers, tuple((rank,) for rank in ranks))
    kinds = workers + _repeat("server", len(holders)) + _repeat("host server", num_hosts)
    if is_own:
        return Roles(kinds, tuple((address,) for address in range(len(kinds))), is_strict, ranks_per_replica)
    shared = {rank: [rank] for rank in ranks}
    for server, rank in enumerate(holders):
        shared[rank].append(num_ranks + server)
    for host in range(num_hosts):
        shared[host * ranks_per_host].append(num_ranks + len(holders) + host)
    return Roles(kinds, tuple(map(tuple, shared.values())), is_strict, ranks_per_replica)


def _repeat(kind: RoleKind, times: int) -> tuple[RoleKind, ...]:
    return (kind,) * times
