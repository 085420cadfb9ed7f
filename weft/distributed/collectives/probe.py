"""Measures the cost of a message on a group: ping-pong between two ranks over several sizes."""

from statistics import median

import torch

from weft.distributed.group.group import AbstractGroup
from weft.errors import UsageError
from weft.planning.network import NetworkFit, fit_alpha_beta

__all__ = ["PROBED_SIZES", "probe"]

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
