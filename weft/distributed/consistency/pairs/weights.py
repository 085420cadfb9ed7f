"""A rank's weights where neighbours can reach them: the worker changes them by steps, its responder by pairs.

worker     | gradient, of the model's own copy ............ | step |  gradient ....
responder  |        pair            pair    look            |  -   |        pair
weights    x ------ (x + a) / 2 --- ....... copied -------- - lr g -- ....

With a codec a pair leaves x + (q(a) - q(x)) / 2 here, and the answer is q(x), from which the other end does the same.
Pairs and copies that come while a step is made wait for its end. In a replay they, and steps, wait for their turn.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, PackedTensors, decode_packed, encode_packed, write
from weft.distributed.consistency.control import Journal, Outgoing
from weft.distributed.consistency.graphs import draw_all
from weft.distributed.consistency.pairs.events import Event, Look, Mix, Pair, Step
from weft.distributed.consistency.pairs.protocol import Tag
from weft.errors import EncodingError

__all__ = ["Request", "SharedWeights"]


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
        self._weights: PackedTensors | None = None
        self._codec: AbstractCodec = ExactCodec()
        self._journal = Journal(None, {})
        self._replayed: deque[Event] = deque()
        self._waiting: list[Request] = []
        self._is_stepping = False
        self._is_awaited = False  # by the worker, whose step is not the next event of the replay
        self._answered_bytes = 0

    # What the worker does.

    def begin(
        self,
        run: int,
        weights: PackedTensors,
        journal: Journal,
        replayed: Iterable[Event] = (),
        codec: AbstractCodec | None = None,
    ) -> None:
        """A training begins: what came for it early is done next."""
        self.close()
        with self._lock:
            self._codec = codec or ExactCodec()
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
            write(self._own.tensors, parameters)
            self._pass(step)
            self._is_stepping = False
            return bool(self._waiting)

    def note(self, event: Event) -> None:
        """Record an event that does not touch the weights."""
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
            copies = [flat.clone() for flat in self._own.messages]
            return [Outgoing(request.source, Tag.VIEW, {"run": self._run, "number": request.event.number}, copies)]
        try:
            given = decode_packed(self._codec, self._own, request.tensors)
        except EncodingError:
            self.num_malformed += 1
            return []
        self._pass(request.event)
        if self._codec.is_exact:
            average(self._own.messages, given)
            answer: Sequence[Tensor] = given
        else:
            answer = encode_packed(self._codec, self._own)
            draw_all(self._own.messages, decode_packed(self._codec, self._own, answer), [given])
        self._answered_bytes += sum(tensor.nbytes for tensor in answer)
        return [Outgoing(request.source, Tag.PAIRED, {"run": self._run, "turn": request.event.turn}, answer)]

    @property
    def _own(self) -> PackedTensors:
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
