"""Gossip: every rank takes the mean of its own and its neighbours' weights in each step (D-PSGD, Lian et al., 2017).

    rank r     x_r --+-- gradient g_r of its share, at x_r ---------------+
                     |                                                    |  x_r <- sum_j W[r, j] x_j - lr g_r
                     +-- to the neighbours; theirs arrive meanwhile ------+

Weights are mixed, not gradients: mixed gradients alone would never bring the replicas together. With a codec a rank
moves by the differences that all see, x_r <- x_r + sum_j W[r, j] (q(x_j) - q(x_r)) - lr g_r; with one that cannot carry
weights, by those of estimates (estimates.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, cast, final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, write
from weft.distributed.consistency.estimates import Estimates
from weft.distributed.consistency.graphs import Mixing, draw_all, make_mixing
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.consistency.scheme import AbstractGroupScheme, Memory, memory_of, remember_codec
from weft.distributed.group.calls import AllReduce, NeighbourAllReduce
from weft.distributed.group.group import AbstractGroup
from weft.specs.plan import Choice
from weft.training.checkpoint import Entry
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic

__all__ = ["Gossip", "make_gossip"]


@final
class Gossip(AbstractGroupScheme):
    """The ranks stand for the mean of their weights. Optimizer state is each rank's own.

    Args:
        mix: `during` the gradient, as in the paper, which is then that of the weights before mixing; or `after` the
            update, which waits for the neighbours and keeps the replicas nearer (adapt, then combine).
        gamma: of estimates; None for that of the codec.
    """

    def __init__(
        self,
        group: AbstractGroup,
        mixing: Mixing,
        *,
        mix: Literal["during", "after"] = "during",
        codec: AbstractCodec | None = None,
        gamma: float | None = None,
    ) -> None:
        self._group = group
        self._codec = codec or ExactCodec()
        self._gamma = self._codec.mixing_step if gamma is None else gamma
        self._estimates: Estimates | None = None
        self._mixing = mixing
        self._mix = mix
        self._listeners = [rank for rank, heard in enumerate(mixing.graph) if group.rank in heard]
        self._heard: list[list[Tensor]] = []
        self._parameters: Mapping[str, Tensor] = {}
        self._weights: Parcel | None = None
        self._traffic = Traffic()

    @property
    def period(self) -> None:
        return None

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._codec.remember({})
        if self._codec.carries_weights:
            self._weights = Parcel(self._group, parameters, self._codec)
            return
        self._weights = Parcel(self._group, parameters)
        sources, targets = self._mixing.graph[self._group.rank], self._listeners
        self._estimates = Estimates(
            self._group, parameters, self._codec, sources=sources, targets=targets, gamma=self._gamma
        )

    def begin_together(self) -> None:
        if self._estimates is not None:
            self._estimates.begin(self._parameters)

    def begin(self, step: int, weight: float) -> None:
        if self._mix == "during":
            self._send()

    def advance(self) -> None:
        (self._estimates or self._parcel).advance()

    def before_update(self) -> None:
        if self._mix == "during":
            self._take()

    def after_update(self, state: OptimizerState) -> OptimizerState:
        if self._mix == "after":
            self._send()
            self._take()
        return state

    def consensus(self) -> Mapping[str, Tensor]:
        self._parcel.pack(self._parameters, 1 / self._group.size)
        self._parcel.start(AllReduce)
        self._parcel.wait()
        return self._parcel.tensors

    def traffic(self) -> Traffic:
        return self._traffic

    def memory(self) -> Memory:
        own = {} if self._estimates is None else self._estimates.own
        return {
            **{f"gossip/known/{name}": ("own", known) for name, known in own.items()},
            **memory_of(self._codec, "gossip"),
        }

    def remember(self, entries: Mapping[str, Entry]) -> None:
        remember_codec(self._codec, "gossip", entries, self._parameters)
        if self._estimates is not None:  # of ranks that come from elsewhere all is known
            found = {name: entries.get(f"gossip/known/{name}") for name in self._parameters}
            known = {name: entry.tensor for name, entry in found.items() if entry is not None}
            self._estimates.begin({**self._parameters, **known})

    @property
    def _parcel(self) -> Parcel:
        assert self._weights is not None, "join() comes first"
        return self._weights

    def _send(self) -> None:
        if self._estimates is not None:
            self._estimates.send()
            return
        graph, weights = self._mixing.graph, self._mixing.weights
        self._parcel.pack(self._parameters)
        if self._codec.is_exact:
            self._parcel.start(lambda message: NeighbourAllReduce(message, graph, weights))
        else:
            self._heard = self._parcel.exchange(graph[self._group.rank], self._listeners)

    def _take(self) -> None:
        traffic = self._parcel.wait() if self._estimates is None else self._estimates.take()
        self._traffic = replace(traffic, num_bytes=traffic.num_bytes * len(self._listeners))
        if self._estimates is not None:
            return
        if not self._codec.is_exact:
            others = [self._parcel.decode(heard) for heard in self._heard]
            draw_all(self._parcel.messages, self._parcel.seen, others)
        write(self._parameters, self._parcel.tensors)


def make_gossip(group: AbstractGroup, choice: Choice, codec: AbstractCodec) -> Gossip:
    """The scheme of `gossip(...)` in a plan."""
    mix = cast(Literal["during", "after"], choice["mix"])
    mixing, gamma = make_mixing(str(choice["graph"]), group.size), choice["gamma"]
    return Gossip(group, mixing, mix=mix, codec=codec, gamma=None if gamma == "auto" else float(gamma))
