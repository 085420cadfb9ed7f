"""The alpha-beta network with contention: which links a message takes, when each is free, when it arrives.

A message of n bytes from rank s to rank t crosses these links in order (those in brackets where the model has them):

    one host:    s ==out==> ==in==> t
    two hosts:   s ==out==> [==host up==>] [==backbone==] [==host down==>] ==in==> t

Each rank has one full-duplex port (out and in never disturb each other), and so has each host; the backbone is one
medium for all. A link serves messages in the order in which they were handed over, each for n * beta seconds of its
own rate. A message is cut through: it enters the next link as soon as its first byte is there and the link is free,
and leaves it no earlier than it left the one before; a fast link that is fed slowly is free again earlier, because
packets of others pass in between. A message arrives alpha seconds after it left the last link. Alpha is pure latency
and holds no link.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from weft.errors import UsageError
from weft.planning.cluster import ClusterSpec, Link

__all__ = [
    "TEN_GIGABIT",
    "LinkSchedule",
    "NetworkFit",
    "NetworkModel",
    "SlowPair",
    "Transfer",
    "fit_alpha_beta",
    "network_of",
]


@dataclass(frozen=True)
class SlowPair:
    """Messages from `source` to `target` take `factor` times as long, latency included."""

    source: int
    target: int
    factor: float


@dataclass(frozen=True)
class NetworkModel:
    """Costs of messages. Without `ranks_per_host` every rank is a host of its own.

    `host_beta` and `backbone_beta` are seconds per byte of the shared links, None where they are never the bottleneck;
    `gamma` is the seconds that a rank's network side takes to reduce one byte; `host_overrides` are pairs of a
    rank and the host that it is on although its number is of another.
    """

    between: Link
    inside: Link | None = None
    ranks_per_host: int | None = None
    host_beta: float | None = None
    backbone_beta: float | None = None
    gamma: float = 0.0
    slow: tuple[SlowPair, ...] = ()
    host_overrides: tuple[tuple[int, int], ...] = ()

    def host_of(self, rank: int) -> int:
        home = rank // self.ranks_per_host if self.ranks_per_host else rank
        return next((host for moved, host in self.host_overrides if moved == rank), home)

    def link(self, source: int, target: int) -> Link:
        """Cost of a message that meets no other."""
        near = self.inside is not None and self.host_of(source) == self.host_of(target)
        link = self.inside if near and self.inside is not None else self.between
        for pair in self.slow:
            if (pair.source, pair.target) == (source, target):
                link = Link(link.alpha * pair.factor, link.beta * pair.factor)
        return link


TEN_GIGABIT = NetworkModel(between=Link(alpha=3e-5, beta=8e-10))
"""Plain 10 Gbit/s Ethernet: 30 microseconds a message, 1.25 GB/s."""


def network_of(cluster: ClusterSpec) -> NetworkModel:
    """The network of a probed cluster: the ranks of a host share its line to the others."""
    return NetworkModel(
        between=cluster.between,
        inside=cluster.inside,
        ranks_per_host=cluster.ranks_per_host,
        host_beta=cluster.between.beta,
        gamma=cluster.gamma,
    )


class Transfer(NamedTuple):
    """When the last byte left the sender, and when it reached the receiver."""

    sent: float
    received: float


@final
class LinkSchedule:
    """When each link is free again. Messages must be given in the order of their moments.

    >>> links = LinkSchedule(NetworkModel(Link(alpha=1.0, beta=0.5)), 3)
    >>> links.transfer(0, 2, 4, moment=0.0)
    Transfer(sent=2.0, received=3.0)
    >>> links.transfer(1, 2, 4, moment=0.0)  # waits for the first at rank 2's port
    Transfer(sent=2.0, received=5.0)
    """

    def __init__(self, model: NetworkModel, size: int) -> None:
        if size < 1:
            raise UsageError(f"network has no ranks (size: {size}); give at least 1")
        self._model = model
        self._size = size
        num_hosts = max(model.host_of(rank) for rank in range(size)) + 1
        self._up, self._down = 2 * size, 2 * size + num_hosts
        self._backbone = 2 * size + 2 * num_hosts
        self._free = [0.0] * (self._backbone + 1)
        self._routes: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}

    def transfer(self, source: int, target: int, num_bytes: int, moment: float) -> Transfer:
        """Book the links for a message that is handed over at `moment`."""
        pair = source * self._size + target
        route = self._routes.get(pair)
        if route is None:
            route = self._routes[pair] = self._route(source, target)
        alpha, links = route
        free = self._free
        head = tail = moment
        sent = -1.0
        for link, beta in links:
            if free[link] > head:
                head = free[link]
            end = free[link] = head + num_bytes * beta
            if end > tail:
                tail = end
            if sent < 0:
                sent = tail
        return Transfer(sent, tail + alpha)

    def _route(self, source: int, target: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Latency, and the (link, seconds per byte) on the way."""
        model = self._model
        cost = model.link(source, target)
        from_host, to_host = model.host_of(source), model.host_of(target)
        links = [(source, cost.beta)]
        if from_host != to_host:
            if model.host_beta is not None:
                links.append((self._up + from_host, model.host_beta))
            if model.backbone_beta is not None:
                links.append((self._backbone, model.backbone_beta))
            if model.host_beta is not None:
                links.append((self._down + to_host, model.host_beta))
        links.append((self._size + target, cost.beta))
        return cost.alpha, tuple(links)


@dataclass(frozen=True)
class NetworkFit:
    """Times of messages (bytes, seconds of one way), and the line through them."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]
    alpha: float
    beta: float

    @property
    def link(self) -> Link:
        return Link(self.alpha, self.beta)

    @property
    def worst_error(self) -> float:
        """Largest relative distance of a time from the line."""
        return max(
            abs(self.link.seconds(size) - time) / time for size, time in zip(self.sizes, self.times, strict=True)
        )


def fit_alpha_beta(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Alpha (seconds) and beta (seconds per byte), neither negative, that bring `alpha + size * beta` near the times.

    Errors are relative, so that small messages count as much as large ones, and absolute rather than squared (by
    re-weighting), so that a few disturbed times do not move the line.

    >>> alpha, beta = fit_alpha_beta([0, 1000, 2000], [1e-5, 1.1e-5, 1.2e-5])
    >>> round(alpha * 1e6, 6), round(beta * 1e9, 6)
    (10.0, 1.0)
    """
    from scipy.optimize import nnls  # half a second, which only a fit is to wait for

    if len(sizes) != len(times) or len(set(sizes)) < 2 or min(times) <= 0:
        raise UsageError(
            f"a line needs two message sizes with times above zero (sizes: {len(set(sizes))}, times: {len(times)}); "
            "time more messages"
        )
    seconds = np.asarray(times, dtype=np.float64)
    scale = float(max(sizes))
    columns = np.stack([1 / seconds, np.asarray(sizes, dtype=np.float64) / scale / seconds], axis=1)
    # Columns of like size keep the solver well conditioned: seconds are of the order of microseconds.
    norms = np.linalg.norm(columns, axis=0)
    columns /= norms
    weights = np.ones_like(seconds)
    solution = np.zeros(2)
    for _ in range(40):
        solution, _ = nnls(columns * weights[:, None], weights)
        residuals = np.abs(columns @ solution - 1)
        weights = 1 / np.sqrt(np.maximum(residuals, 1e-9))
    alpha, slope = solution / norms
    return float(alpha), float(slope / scale)
