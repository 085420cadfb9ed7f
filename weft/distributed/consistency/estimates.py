"""Estimates that neighbours have of each other's weights, made of changes (CHOCO-SGD, Koloskova et al., 2019).

    rank r     q(x_r - e_r)  ------> neighbours          e_r <- e_r + q(x_r - e_r)      at both ends, to the same bits
               x_r <- x_r + gamma sum_j W[r, j] (e_j - e_r)

For codecs that cannot carry weights: a top-k of weights is no weights. What was not sent, x_r - e_r, is in the next
difference again; so a codec keeps nothing back here, or it would be sent twice. The sum over ranks of what they move by
is zero whatever the estimates are: the mean of all weights is kept.
"""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, forget_unsent, write
from weft.distributed.consistency.graphs import draw_all
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.group.group import AbstractGroup
from weft.training.replicas import Traffic

__all__ = ["Estimates"]


@final
class Estimates:
    """Of this rank and of those that it hears. `begin`, then for each round `send`, `take`.

    Args:
        sources: ranks that it hears.
        targets: ranks that hear it.
        gamma: how far ranks move towards each other, of the way that exact weights would take them: less than 1 where
            estimates are far behind.
    """

    def __init__(
        self,
        group: AbstractGroup,
        parameters: Mapping[str, Tensor],
        codec: AbstractCodec,
        *,
        sources: Sequence[int],
        targets: Sequence[int],
        gamma: float,
    ) -> None:
        self._group = group
        self._parameters = parameters
        self._codec = codec
        self._sources, self._targets = sources, targets
        self._gamma = gamma
        self._changes = Parcel(group, parameters, codec)
        self._own: list[Tensor] = []
        self._others: list[list[Tensor]] = []
        self._heard: list[list[Tensor]] = []

    def begin(self, own: Mapping[str, Tensor]) -> None:
        """Ranks tell each other in full of what they are to be known by. A collective call."""
        exact = Parcel(self._group, self._parameters)
        exact.pack(own)
        self._others = exact.exchange(self._sources, self._targets)
        exact.wait()
        self._own = exact.messages

    @property
    def own(self) -> Mapping[str, Tensor]:
        """This rank's weights as its neighbours know them."""
        return self._changes.views_of(self._own)

    @torch.no_grad()
    def send(self) -> None:
        """How far the weights are from what the neighbours know of them."""
        self._changes.pack(self._parameters)
        for message, known in zip(self._changes.messages, self._own, strict=True):
            message.sub_(known)
        self._heard = self._changes.exchange(self._sources, self._targets)
        forget_unsent(self._codec)

    def advance(self) -> None:
        self._changes.advance()

    @torch.no_grad()
    def take(self) -> Traffic:
        """Both ends know what was sent; this rank's weights move towards those of its neighbours."""
        traffic = self._changes.wait()
        _add(self._own, self._changes.seen)
        for known, heard in zip(self._others, self._heard, strict=True):
            _add(known, self._changes.decode(heard))
        for message in self._changes.messages:
            message.zero_()
        draw_all(self._changes.messages, self._own, self._others)
        moved = {
            name: parameter + self._gamma * self._changes.tensors[name] for name, parameter in self._parameters.items()
        }
        write(self._parameters, moved)
        return traffic


def _add(known: Sequence[Tensor], changes: Sequence[Tensor]) -> None:
    for message, change in zip(known, changes, strict=True):
        message.add_(change.view_as(message))
