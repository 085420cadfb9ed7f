"""Measures a group: messages inside a host and between hosts, lines that ranks share, and its own all-reduce."""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from weft.distributed.group.group import AbstractGroup
from weft.errors import UsageError
from weft.planning.network import NetworkFit, NetworkModel, fit_alpha_beta

__all__ = ["PROBED_SIZES", "probe", "probe_all_reduce", "probe_network"]

PROBED_SIZES = (8, 1024, 16_384, 131_072, 1_048_576, 8_388_608)


def probe(
    group: AbstractGroup,
    *,
    peers: tuple[int, int] = (0, 1),
    sizes: tuple[int, ...] = PROBED_SIZES,
    num_warm_ups: int = 2,
    num_repeats: int = 9,
) -> NetworkFit:
    """Alpha and beta between two ranks of the group. A collective call: every rank gets the same answer.

    Args:
        peers: the two ranks that play ping-pong.
        sizes: of the messages, in bytes. The time of one way is half of the median round trip.
    """
    if group.size < 2:
        raise UsageError(f"a probe needs two ranks (size: {group.size}); run it with --workers 2 or more")
    times = torch.zeros(len(sizes), dtype=torch.float64)
    if group.rank in peers:
        for i, size in enumerate(sizes):
            times[i] = _one_way(group, peers, size, num_warm_ups, num_repeats)
    group.broadcast(times, root=peers[0])
    seconds = tuple(times.tolist())
    return NetworkFit(sizes, seconds, *fit_alpha_beta(sizes, seconds))


def probe_network(group: AbstractGroup, ranks_per_host: int | None = None) -> NetworkModel:
    """The network among the ranks. A collective call: every rank gets the same answer.

    Args:
        ranks_per_host: as this rank sees it. Hosts of one rank, or one host of all, have one kind of link; so have
            hosts that differ, among which that of the first and the last rank counts for all.
    """
    inner = _agree_on_hosts(group, ranks_per_host or group.size)
    if inner in (1, group.size):
        return NetworkModel(probe(group, peers=(0, group.size - 1)).link)
    inside, between = probe(group).link, probe(group, peers=(0, inner)).link
    # All ranks of host 0 send at once: how much longer that takes than one of them tells what they share.
    size = PROBED_SIZES[-1]
    seconds = max(_slowest(group, partial(_burst, group, inner, size)) - 2 * between.alpha, 0.0)
    return NetworkModel(between, inside, inner, host_beta=seconds / (inner * size))


def probe_all_reduce(group: AbstractGroup, sizes: tuple[int, ...] = PROBED_SIZES) -> tuple[tuple[int, float], ...]:
    """The (bytes, seconds) of all-reduces as the group makes them. A collective call, with one answer for all ranks."""
    points = []
    for size in sizes:
        message = group.empty((size // 4,))
        message.zero_()
        points.append((size, _slowest(group, partial(group.all_reduce, message))))
    return tuple(points)


def _agree_on_hosts(group: AbstractGroup, ranks_per_host: int) -> int:
    """The number that all say; 1 where they differ, or where that many do not divide all."""
    said = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(said, torch.tensor([ranks_per_host]))
    is_even = len(set(said.tolist())) == 1 and group.size % ranks_per_host == 0
    return ranks_per_host if is_even else 1


def _slowest(group: AbstractGroup, act: Callable[[], None], num_warm_ups: int = 1, num_repeats: int = 5) -> float:
    """The median of what an act of all ranks takes the slowest of them."""
    times = torch.zeros(num_warm_ups + num_repeats, dtype=torch.float64)
    for i in range(len(times)):
        group.barrier()
        began = group.clock.now()
        act()
        times[i] = group.clock.now() - began
    group.all_reduce(times, "max")
    return float(median(times[num_warm_ups:].tolist()))


def _burst(group: AbstractGroup, inner: int, size: int) -> None:
    """From every rank of host 0 to its like on host 1, who says that it came."""
    message, answer = group.empty((size,), torch.uint8), group.empty((1,), torch.uint8)
    message.zero_()
    if group.rank < inner:
        group.send(message, group.rank + inner)
        group.recv(answer, group.rank + inner)
    elif group.rank < 2 * inner:
        group.recv(message, group.rank - inner)
        group.send(answer.zero_(), group.rank - inner)


def _one_way(group: AbstractGroup, peers: tuple[int, int], size: int, num_warm_ups: int, num_repeats: int) -> float:
    first, second = peers
    message = group.empty((size,), torch.uint8)
    message.zero_()
    round_trips = []
    for _ in range(num_warm_ups + num_repeats):
        began = group.clock.now()
        if group.rank == first:
            group.send(message, second)
            group.recv(message, second)
        else:
            group.recv(message, first)
            group.send(message, first)
        round_trips.append(group.clock.now() - began)
    return median(round_trips[num_warm_ups:]) / 2
