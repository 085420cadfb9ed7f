"""Ranks in step: the calls of a script that all ranks make are noted, and those over the world's group compared.

meeting     over the world's group: a header of all ranks tells at once whether they are in the same call
waiting     in a group or mailbox of a plan: noted and nothing else, for it is in the way of every step
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.uneven import gather_parts
from weft.distributed.place import AbstractPlace
from weft.distributed.script.world.out_of_step import tell_differing_facts
from weft.distributed.script.world.watchdog import Board, Watchdog
from weft.distributed.script.world.whereabouts import Closable, Note, NotedCall, Whereabouts
from weft.errors import DeadlineError, OutOfStepError, PeerLostError
from weft.script_lines import ScriptLine

__all__ = ["NO_FACTS", "Facts", "InStep"]

Facts = Mapping[str, object]
"""Names and values that must be the same on all ranks, in an order that must be too."""

NO_FACTS: Facts = {}


@final
class InStep:
    """The calls of one process of a script.

    Args:
        open_group: the world's group, which is a collective call of all processes when it is called for the first time.
        num_ranks: processes from this number on are servers alone: they take part where all processes must, and meet
            nobody.
    """

    def __init__(self, place: AbstractPlace, num_ranks: int, open_group: Callable[[], AbstractGroup]) -> None:
        self._place, self._num_ranks, self._open_group = place, num_ranks, open_group
        self._is_open = False
        self._group: AbstractGroup | None = None
        self._raised: Exception | None = None
        self.whereabouts = Whereabouts()
        self._watchdog: Watchdog | None = None

    @contextmanager
    def meeting(self, kind: str, facts: Facts = NO_FACTS, *, same_line: bool = True) -> Iterator[None]:
        """A call over the world's group; see `World.meeting`."""
        if self._place.size == 1:
            yield
            return
        with self.waiting(kind, self._group):
            self._group = self._open_group()
            if self._group.size > 1:
                self._compare(self._group, kind, facts, same_line=same_line)
            yield

    def waiting(self, kind: str, closes: Closable | None, *, together: bool = True) -> AbstractContextManager[None]:
        """A wait in a group or mailbox of a plan, as often as it is entered; see `World.waiting`."""
        if self._place.size == 1:
            return nullcontext()
        self.open()
        return _Waiting(self, kind, closes, together=together)

    def waiting_unless_noted(self, kind: str, closes: Closable) -> AbstractContextManager[None]:
        """As `waiting`; nothing where what this rank waits in has been noted already."""
        return nullcontext() if self.whereabouts.waits_in is not None else self.waiting(kind, closes)

    def open(self) -> None:
        """Watch from now on, where time is real. The first call of all processes is a collective one."""
        if self._is_open:
            return
        self._is_open = True
        store = self._place.open_notes()
        if store is not None and self._place.rank < self._num_ranks:
            self._watchdog = Watchdog(self.whereabouts, Board(store, self._place.rank, self._num_ranks))
            self._watchdog.start()

    def leave(self) -> None:
        """This rank makes no more calls."""
        if self._watchdog is not None:
            self._watchdog.leave()

    def check(self) -> None:
        """Raise OutOfStepError if ranks are known to be out of step, whatever the script has made of it before."""
        if self._watchdog is not None and self._watchdog.finding is not None:
            raise OutOfStepError(self._watchdog.finding)

    def explain(self, error: BaseException) -> Exception | None:
        """The error to raise in the place of one that ended a wait; None where that one tells enough."""
        watchdog = self._watchdog
        if watchdog is None or error is self._raised or not isinstance(error, Exception):
            return None
        if watchdog.finding is None and not isinstance(error, PeerLostError | DeadlineError | OutOfStepError):
            return None
        self._raised = watchdog.explain(error)
        return None if self._raised is error else self._raised

    def _compare(self, group: AbstractGroup, kind: str, facts: Facts, *, same_line: bool) -> None:
        """Tell all ranks in a few bytes what this one is about to do, and raise on all where one differs."""
        line = self.whereabouts.line()
        rows = [[name, str(value)] for name, value in facts.items()]
        place = [line.file.rpartition(os.sep)[2], line.line, line.function] if same_line else []
        digest = zlib.crc32(json.dumps([kind, rows, place]).encode())
        table = torch.empty(group.size, 2, dtype=torch.int64)
        group.all_gather(table, torch.tensor([[self.whereabouts.number, digest]]))
        numbers, digests = zip(*table.tolist(), strict=True)
        self.whereabouts.number = max(numbers)  # should ranks have counted differently before, they do not from here on
        if len(set(digests)) > 1:
            own = json.dumps([kind, line.to_json(), rows]).encode()
            parts = gather_parts(group, torch.tensor(list(own), dtype=torch.uint8))
            self._raised = OutOfStepError(_tell_difference(parts, same_line=same_line))
            raise self._raised


def _tell_difference(parts: tuple[Tensor, ...], *, same_line: bool) -> str:
    told = [json.loads(bytes(part.tolist())) for part in parts]
    calls = [NotedCall(0, kind, ScriptLine(**line)) for kind, line, _ in told]
    return tell_differing_facts(calls, [dict(rows) for _, _, rows in told], same_line=same_line)


@final
class _Waiting(AbstractContextManager[None]):
    """Entered in every step: as little as possible is done here."""

    __slots__ = ("_before", "_closes", "_in_step", "_kind", "_together")

    def __init__(self, in_step: InStep, kind: str, closes: Closable | None, *, together: bool) -> None:
        self._in_step, self._kind, self._closes, self._together = in_step, kind, closes, together
        self._before: Note | None = None

    def __enter__(self) -> None:
        self._in_step.check()
        self._before = self._in_step.whereabouts.begin(self._kind, self._closes, together=self._together)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # What is raised must be known before the watchdog is told that this rank has left its call.
        found = None if error is None else self._in_step.explain(error)
        self._in_step.whereabouts.end(self._before)
        if found is not None:
            raise found from None
