"""A rank's weights where neighbours can reach them: the worker changes them by steps, its responder by pairs.

worker     | gradient, of the model's own copy ............ | step |  gradient ....
responder  |        pair            pair    look            |  -   |        pair
weights    x ------ (x + a) / 2 --- ....... copied -------- - lr g -- ....

Pairs and copies that come while a step is made wait for its end. In a replay they, and steps, wait for their turn.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.control import Journal, Outgoing
from weft.distributed.consistency.pairs.events import Event, Look, Mix, Pair, Step
from weft.distributed.consistency.pairs.protocol import Tag

__all__ = ["FlatWeights", "Request", "SharedWeights"]


@final
class FlatWeights:
    """The parameters in one flat tensor for each type; `views` are their parts, by name."""

    def __init__(
        self, parameters: Mapping[str, Tensor], empty: Callable[[tuple[int, ...], torch.dtype], Tensor]
    ) -> None:
        by_type: dict[torch.dtype, list[str]] = {}
        for name, parameter in parameters.items():
            by_type.setdefault(parameter.dtype, []).append(name)
        self._names = list(by_type.values())
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        sizes = [sum(parameters[name].numel() for name in names) for names in self._names]
        self.flats = [empty((size,), dtype) for size, dtype in zip(sizes, by_type, strict=True)]
        self.pack(parameters)

    @property
    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def views_of(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for names, flat in zip(self._names, flats, strict=True):
            parts = flat.split([self._shapes[name].numel() for name in names])
            views |= {name: part.view(self._shapes[name]) for name, part in zip(names, parts, strict=True)}
        return views

    def accepts(self, flats: Sequence[Tensor]) -> bool:
        return [(flat.shape, flat.dtype) for flat in flats] == [(flat.shape, flat.dtype) for flat in self.flats]

    @torch.no_grad()
    def pack(self, parameters: Mapping[str, Tensor]) -> None:
        for name, view in self.views_of(self.flats).items():
            view.copy_(parameters[name])

    @torch.no_grad()
    def unpack(self, parameters: Mapping[str, Tensor], flats: Sequence[Tensor] | None = None) -> None:
        """Write these flat tensors, by default one's own, into the parameters."""
        for name, view in self.views_of(self.flats if flats is None else flats).items():
            parameters[name].copy_(view)


@dataclass(frozen=True, eq=False)
class Request:
    """Of a pair, or of a copy. The tensors of a pair are ours to change."""

    source: int
    run: int
    event: Pair | Look
    tensors: Sequence[Tensor] = ()


@final
class SharedWeights:
    """One rank's weights, shared by its worker and its responder. What is done to them is done under a lock, in a
    moment; a step, which takes its time, only keeps the others out."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_malformed = 0
        self._lock = threading.Lock()
        self._run = -1
        self._weights: FlatWeights | None = None
        self._journal = Journal(None, {})
        self._replayed: deque[Event] = deque()
        self._waiting: list[Request] = []
        self._is_stepping = False
        self._is_awaited = False  # by the worker, whose step is not the next event of the replay
        self._answered_bytes = 0

    # What the worker does.

    def begin(self, run: int, weights: FlatWeights, journal: Journal, replayed: Iterable[Event] = ()) -> None:
        """A training begins: what came for it early is done next."""
        self.close()
        with self._lock:
            self._run, self._weights, self._journal, self._replayed = run, weights, journal, deque(replayed)
            self._is_stepping = self._is_awaited = False
            self._answered_bytes = 0

    def begin_step(self, step: Step | Mix) -> bool:
        """Keep the responder out; False where pairs and copies of the replay come first: the responder tells of it."""
        with self._lock:
            self._is_stepping = not self._replayed or self._replayed[0] == step
            self._is_awaited = not self._is_stepping
            return self._is_stepping

    def end_step(self, parameters: Mapping[str, Tensor], step: Step | Mix) -> bool:
        """Take the updated parameters; whether somebody waits."""
        with self._lock:
            self._own.pack(parameters)
            self._pass(step)
            self._is_stepping = False
            return bool(self._waiting)

    def note(self, event: Event) -> None:
        """What does not touch the weights."""
        with self._lock:
            self._journal.note(event)

    def take_answered_bytes(self) -> int:
        """Of the means that the responder gave out since this was last asked."""
        with self._lock:
            answered, self._answered_bytes = self._answered_bytes, 0
            return answered

    def close(self) -> None:
        """Record no more."""
        with self._lock:
            self._journal.close()
            self._journal = Journal(None, {})

    # What the responder does.

    def serve(self, requests: Iterable[Request] = ()) -> list[Outgoing]:
        """Do what can be done now of these and of all that waits; the answers."""
        with self._lock:
            self._waiting += requests
            answers = []
            while (found := next((request for request in self._waiting if self._may_go(request)), None)) is not None:
                self._waiting.remove(found)
                answers += self._carry_out(found)
            if self._is_awaited and self._replayed and isinstance(self._replayed[0], Step | Mix):
                self._is_awaited = False
                answers.append(Outgoing(self.rank, Tag.GO, {"run": self._run}))
            return answers

    def _may_go(self, request: Request) -> bool:
        if request.run < self._run:
            return True  # to be thrown away
        is_free = request.run == self._run and not self._is_stepping
        return is_free and (not self._replayed or self._replayed[0] == request.event)

    def _carry_out(self, request: Request) -> list[Outgoing]:
        if request.run < self._run:
            return []
        if isinstance(request.event, Look):
            self._pass(request.event)
            copies = [flat.clone() for flat in self._own.flats]
            return [Outgoing(request.source, Tag.VIEW, {"run": self._run, "number": request.event.number}, copies)]
        if not self._own.accepts(request.tensors):
            self.num_malformed += 1
            return []
        self._pass(request.event)
        average(self._own.flats, request.tensors)
        self._answered_bytes += self._own.num_bytes
        return [Outgoing(request.source, Tag.PAIRED, {"run": self._run, "turn": request.event.turn}, request.tensors)]

    @property
    def _own(self) -> FlatWeights:
        assert self._weights is not None, "begin() comes first"
        return self._weights

    def _pass(self, event: Event) -> None:
        if self._replayed:
            following = self._replayed.popleft()
            assert following == event, "events of a replay keep their order"
        self._journal.note(event)


def average(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Both become (own + given) / 2."""
    for mine, theirs in zip(own, given, strict=True):
        torch.add(mine, theirs, out=mine).mul_(0.5)
        theirs.copy_(mine)
