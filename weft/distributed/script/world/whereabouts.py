"""The calls of a rank and the lines of the script that made them, for others to read should they wait for it.

To note a call takes less than a microsecond: where in the script it is, is kept as code and instruction, and looked up
only for a report.
"""

import json
import sys
from collections import deque
from dataclasses import asdict, dataclass
from types import CodeType
from typing import Literal, Protocol, final

from weft.script_lines import NOWHERE, ScriptLine, find_script_frame, line_at

__all__ = ["Closable", "NotedCall", "RankReport", "RankState", "Whereabouts"]

MOST_CALLS = 16

RankState = Literal["works", "waits", "ended", "failed"]


class Closable(Protocol):
    """A group or a mailbox: to close it ends the waiting in it."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class NotedCall:
    """A call of the script. Those that all ranks make together have the same number on all of them; others have 0."""

    number: int
    kind: str
    line: ScriptLine


@dataclass(frozen=True)
class RankReport:
    """A rank as it tells the others: its last calls, the latest at the end, and how many it has made of each kind."""

    rank: int
    state: RankState
    calls: tuple[NotedCall, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    error: str = ""
    """Why it failed."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> "RankReport":
        data = json.loads(text)
        calls = [NotedCall(call["number"], call["kind"], ScriptLine(**call["line"])) for call in data["calls"]]
        counts = tuple((kind, count) for kind, count in data["counts"])
        return RankReport(data["rank"], data["state"], tuple(calls), counts, data["error"])

    @property
    def number(self) -> int:
        """Of the last call that all ranks make together."""
        return max((call.number for call in self.calls), default=0)

    def kind_of(self, number: int) -> str | None:
        """The kind of the call that had this number; None where it is not known, or has not come."""
        return next((call.kind for call in self.calls if call.number == number), None)


Note = tuple[int, str, CodeType | None, int, Closable | None]
"""Number, kind, code and instruction of the script, and what is closed to end the waiting."""


@final
class Whereabouts:
    """The calls of one rank. `waits_in` is the one in which it waits for others; a new object for every call."""

    def __init__(self) -> None:
        self.number = 0
        self.waits_in: Note | None = None
        self._counts: dict[str, int] = {}
        self._notes: deque[Note] = deque(maxlen=MOST_CALLS)

    def begin(self, kind: str, closes: Closable | None = None, *, together: bool = True) -> Note | None:
        """Note a call that waits from now on.

        Args:
            closes: what is closed to end the waiting.
            together: whether all ranks make it, in the same order among their calls.

        Returns:
            The one that it is part of, for `end`.
        """
        before = self.waits_in
        frame = find_script_frame(sys._getframe(1))
        number = 0
        if together:
            self.number = number = self.number + 1
        code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
        self.waits_in = note = (number, kind, code, instruction, closes)
        self._notes.append(note)
        self._counts[kind] = self._counts.get(kind, 0) + 1
        return before

    def end(self, before: Note | None) -> None:
        self.waits_in = before

    def report(self, rank: int, state: RankState, error: str = "") -> RankReport:
        calls = tuple(NotedCall(number, kind, _line(code, at)) for number, kind, code, at, _ in tuple(self._notes))
        return RankReport(rank, state, calls, tuple(self._counts.items()), error)

    def line(self) -> ScriptLine:
        """Of the last call."""
        _, _, code, instruction, _ = self._notes[-1]
        return _line(code, instruction)


def _line(code: CodeType | None, instruction: int) -> ScriptLine:
    return NOWHERE if code is None else line_at(code, instruction)
