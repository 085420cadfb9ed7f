"""Elastic averaging: a force draws ranks and a centre together (EASGD, Zhang, Choromanska and LeCun, 2015).

    rank r, on its turn     x_r --> the centre        x_r    <- x_r    - alpha (x_r - centre)
                            centre <--                centre <- centre + alpha (x_r - centre)      alpha = beta / ranks

A rank meets the centre every `steps` steps, with the weights from before its gradient; the answer, the centre as they
found it, comes while the gradient is computed. `draw_centre` is all of the arithmetic, of both ends and of both
carriers: a group, below, and servers (server/elastic_steps.py), where ranks go at their own pace and may die. With a
codec both ends take the force of what was sent, alpha (q(x_r) - q(centre)), and apply it to their own tensors in full.

In a group the centre lives on rank 0, beside its own replica, and ranks meet it in turns. They wait for rank 0 alone,
never for each other:

    period 4, 4 ranks       step   0  1  2  3 | 4  5  6  7        round-robin: one rank after the other, always in
                            turn  r0 r1 r2 r3 |r0 r1 r2 r3        the same order, so that a run can be repeated
"""

from collections.abc import Mapping
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, write
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.consistency.scheme import AbstractGroupScheme, Memory
from weft.distributed.group.calls import Broadcast
from weft.distributed.group.group import AbstractGroup
from weft.specs.plan import Choice
from weft.training.checkpoint import Entry
from weft.training.optimizers import OptimizerState
from weft.training.replicas import Traffic

__all__ = ["ElasticAveraging", "draw_centre", "is_turn", "make_elastic"]

HOME = 0
"""The rank that keeps the centre."""


@torch.no_grad()
def draw_centre(
    centre: Tensor, visitor: Tensor, alpha: float, *, seen: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Move the centre towards a visitor; the force alpha (x - centre), by which the visitor moves towards the centre.

    The same bits on both ends, in whatever pieces it is computed.

    Args:
        seen: the centre as the visitor was sent it; by default as it is.
        out: where the force is written; the visitor itself, if it is needed no more.

    >>> centre = torch.tensor([1.0])
    >>> draw_centre(centre, torch.tensor([3.0]), 0.25), centre
    (tensor([0.5000]), tensor([1.5000]))
    """
    force = torch.sub(visitor, centre if seen is None else seen, out=out).mul_(alpha)
    centre.add_(force)
    return force


def is_turn(rank: int, step: int, period: int) -> bool:
    """Whether the rank meets the centre in this step; where ranks outnumber the period, several do, in their order."""
    return step % period == rank % period


@final
class ElasticAveraging(AbstractGroupScheme):
    """The ranks stand for the centre.

    Args:
        steps: from one meeting of a rank with the centre to its next (tau of the paper).
        beta: how far all meetings of a round together draw the centre towards the ranks: 0.9 in the paper, for up to 16
            ranks. In turns only alpha need be below 1, and many ranks, each of which takes few samples, need a
            stronger force.
    """

    def __init__(
        self, group: AbstractGroup, *, steps: int, beta: float = 0.9, codec: AbstractCodec | None = None
    ) -> None:
        self._group = group
        self._codec = codec
        self._steps = steps
        self._alpha = beta / group.size
        self._parameters: Mapping[str, Tensor] = {}
        self._parcels: tuple[Parcel, Parcel] | None = None
        self._step = 0
        self._traffic = Traffic()

    @property
    def period(self) -> None:
        return None

    def join(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._parcels = Parcel(self._group, parameters, self._codec), Parcel(self._group, parameters, self._codec)

    def begin_together(self) -> None:
        self._centre.pack(self._parameters)

    def begin(self, step: int, weight: float) -> None:
        self._step = step
        if self._is_home or not self._is_turn(self._group.rank):
            return
        self._visitor.pack(self._parameters)
        self._visitor.send(HOME)
        self._centre.receive(HOME)

    def advance(self) -> None:
        self._visitor.advance()
        self._centre.advance()

    def before_update(self) -> None:
        self._traffic = Traffic()
        if self._is_home:
            self._receive_visitors()
        elif self._is_turn(self._group.rank):
            sent, received = self._visitor.wait(), self._centre.wait()
            exposed, hidden = sent.exposed + received.exposed, max(sent.hidden, received.hidden)
            self._traffic = Traffic(exposed, hidden, sent.num_bytes)
            self._meet()

    def after_update(self, state: OptimizerState) -> OptimizerState:
        return state

    def consensus(self) -> Mapping[str, Tensor]:
        self._centre.start(partial(Broadcast, root=HOME))
        self._centre.wait()
        return self._centre.tensors

    def traffic(self) -> Traffic:
        return self._traffic

    def memory(self) -> Memory:
        """The centre, which rank 0 alone has as it is now."""
        centre = self._centre.tensors if self._is_home else {}
        return {f"elastic/centre/{name}": ("global", tensor) for name, tensor in centre.items()}

    def remember(self, entries: Mapping[str, Entry]) -> None:
        self.begin_together()
        found = {name: entries.get(f"elastic/centre/{name}") for name in self._parameters}
        write(self._centre.tensors, {name: entry.tensor for name, entry in found.items() if entry is not None})

    @property
    def _is_home(self) -> bool:
        return self._group.rank == HOME

    @property
    def _visitor(self) -> Parcel:
        """The weights that meet the centre: this rank's own, or, at home, those that have just arrived."""
        assert self._parcels is not None, "join() comes first"
        return self._parcels[0]

    @property
    def _centre(self) -> Parcel:
        """At home the centre itself, elsewhere the last copy of it."""
        assert self._parcels is not None, "join() comes first"
        return self._parcels[1]

    def _is_turn(self, rank: int) -> bool:
        return is_turn(rank, self._step, self._steps)

    def _receive_visitors(self) -> None:
        """Each rank whose turn it is gets the centre as it was before its own visit."""
        began, num_bytes = self._group.clock.now(), 0
        for rank in range(self._group.size):
            if not self._is_turn(rank):
                continue
            if rank == HOME:
                self._visitor.pack(self._parameters)
                self._visitor.see()
                self._centre.see()
            else:
                self._visitor.receive(rank)
                self._visitor.wait()
                self._centre.send(rank)
                num_bytes += self._centre.wait().num_bytes
            self._meet(is_own=rank == HOME)
        self._traffic = Traffic(self._group.clock.now() - began, 0.0, num_bytes)

    @torch.no_grad()
    def _meet(self, *, is_own: bool = True) -> None:
        """Move the centre, or this rank's copy of it, and this rank's weights if they are the visitor."""
        for centre, seen, visitor in zip(self._centre.messages, self._centre.seen, self._visitor.seen, strict=True):
            draw_centre(centre, visitor, self._alpha, seen=seen, out=visitor)
        for name, force in self._visitor.views_of(self._visitor.seen).items() if is_own else ():
            self._parameters[name].sub_(force)


def make_elastic(group: AbstractGroup, choice: Choice, codec: AbstractCodec) -> ElasticAveraging:
    """The scheme of `elastic(...)` in a plan."""
    return ElasticAveraging(group, steps=int(choice["steps"]), beta=float(choice["beta"]), codec=codec)
