"""The cost of messages on the ranks at hand: inside a host, and over sockets."""

import socket
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from weft.distributed.collectives import choose, probe
from weft.distributed.group.group import AbstractGroup
from weft.distributed.place import Launch, find_launch, open_group
from weft.engines.local import run_ranks
from weft.engines.rank_program import RankProgram
from weft.errors import UsageError
from weft.planning.cluster import ClusterSpec
from weft.planning.network import NetworkFit, network_of

__all__ = ["Chosen", "ClusterProbe", "probe_cluster", "probe_rank", "seconds_per_byte_reduced", "table_of_choices"]

NAME_BYTES = 64
REDUCED_BYTES = 1 << 20


@dataclass(frozen=True)
class ClusterProbe:
    """The lines that were fitted, and the cluster that follows from them."""

    cluster: ClusterSpec
    inside: NetworkFit  # shared memory
    between: NetworkFit  # sockets


@dataclass(frozen=True)
class Chosen:
    """The all-reduce that is the fastest for a message, and the seconds it is expected to take."""

    num_ranks: int
    num_bytes: int
    algorithm: str
    seconds: float


def probe_cluster(num_ranks: int = 2) -> ClusterProbe | None:
    """Probe with ranks started here, or with those that exist; None on ranks other than the first of those."""
    launch = find_launch()
    if launch.launcher != "nobody":
        found = probe_rank()
        return _from_json(found) if launch.rank == 0 else None
    if num_ranks < 2:
        raise UsageError(f"a probe needs two ranks (ranks: {num_ranks}); run it with --workers 2 or more")
    return _from_json(run_ranks(RankProgram("weft.simulation.probing:probe_rank", {}), num_ranks)[0])


def probe_rank() -> dict[str, Any]:
    """The rank program of a probe."""
    launch = find_launch()
    torch.set_num_threads(1)
    over_sockets = open_group(launch, "torch")
    try:
        hosts = _gather_hosts(over_sockets, launch)
        gamma = torch.tensor(seconds_per_byte_reduced(), dtype=torch.float64)
        over_sockets.broadcast(gamma)
        between = probe(over_sockets, peers=(0, 1) if launch.is_one_host else (0, launch.local_size))
    finally:
        over_sockets.close()
    inside = between if launch.local_size == 1 else _probe_inside(launch)
    return {
        "hosts": hosts,
        "ranks_per_host": launch.local_size,
        "inside": asdict(inside),
        "between": asdict(between),
        "gamma": gamma.item(),
    }


def table_of_choices(cluster: ClusterSpec, nums_ranks: tuple[int, ...], sizes: tuple[int, ...]) -> list[Chosen]:
    """For every number of ranks, which fill one host after the other, and every message size (bytes)."""
    network = network_of(cluster)
    table = []
    for num_ranks in nums_ranks:
        for size in sizes:
            fastest = choose(network, num_ranks, size)
            table.append(Chosen(num_ranks, size, str(fastest.algorithm), fastest.seconds))
    return table


def _probe_inside(launch: Launch) -> NetworkFit:
    # Between hosts, messages to a rank of the same host also go through its memory.
    group = open_group(launch, "shared_memory" if launch.is_one_host else "hierarchical", generation=1)
    try:
        return probe(group)
    finally:
        group.close()


def _gather_hosts(group: AbstractGroup, launch: Launch) -> list[str]:
    """The name of every host, in the order of ranks."""
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
    names = torch.empty(group.size, NAME_BYTES, dtype=torch.uint8)
    group.all_gather(names, torch.tensor([list(name)], dtype=torch.uint8))
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in names[:: launch.local_size]]


def seconds_per_byte_reduced(num_repeats: int = 15) -> float:
    """The seconds that adding one byte of a message to another takes."""
    total, other = torch.zeros(REDUCED_BYTES // 4), torch.ones(REDUCED_BYTES // 4)
    seconds = []
    for _ in range(num_repeats):
        began = time.perf_counter()
        total.add_(other)
        seconds.append(time.perf_counter() - began)
    return median(seconds) / REDUCED_BYTES


def _from_json(found: dict[str, Any]) -> ClusterProbe:
    inside, between = (_fit_from_json(found[key]) for key in ("inside", "between"))
    cluster = ClusterSpec(
        tuple(found["hosts"]), found["ranks_per_host"], inside.link, between.link, gamma=found["gamma"]
    )
    return ClusterProbe(cluster, inside, between)


def _fit_from_json(data: dict[str, Any]) -> NetworkFit:
    return NetworkFit(tuple(data["sizes"]), tuple(data["times"]), data["alpha"], data["beta"])
