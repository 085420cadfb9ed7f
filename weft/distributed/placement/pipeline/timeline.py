"""When the actions of a schedule happen, if every stage waits for what it needs: idle time, memory, and no deadlock."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from weft.distributed.placement.pipeline.actions import Action, Kind, Schedule

__all__ = ["DURATIONS", "StuckError", "Timeline", "most_in_flight", "play"]

DURATIONS: Mapping[Kind, float] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
"""Backward computes two products for each one of forward: one for the input, one for the parameters."""


class StuckError(Exception):
    """No stage can go on: each waits for another."""


@dataclass(frozen=True)
class Timeline:
    """Begin and end of every action, by stage, in their order."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def seconds(self) -> float:
        return max(end for row in self.spans for _, _, end in row)

    @property
    def idle_share(self) -> float:
        """Of all stages' time together, from the first action to the end of the last."""
        busy = sum(end - begin for row in self.spans for _, begin, end in row)
        return 1 - busy / (self.seconds * len(self.spans))


def play(schedule: Schedule, durations: Mapping[Kind, float] = DURATIONS, link: float = 0.0) -> Timeline:
    """Run all stages with receives that block and sends that do not.

    Args:
        durations: of a pass through a stage; a chunk takes its share.
        link: seconds that a message takes.

    Raises:
        StuckError: no stage can go on.
    """
    player = _Player(schedule, lambda action: durations[action.kind] / schedule.num_chunks, link)
    while player.advance():
        pass
    if not player.is_over:
        raise StuckError(f"stages wait for each other (next actions: {player.heads})")
    return Timeline(tuple(map(tuple, player.spans)))


@final
class _Player:
    def __init__(self, schedule: Schedule, duration: Callable[[Action], float], link: float) -> None:
        self._schedule = schedule
        self._duration = duration
        self._link = link
        self._done: dict[tuple[str, int, int], float] = {}  # (forward or backward, number of the chunk, micro) -> end
        self.spans: list[list[tuple[Action, float, float]]] = [[] for _ in schedule.stages]

    @property
    def is_over(self) -> bool:
        return all(len(spans) == len(row) for spans, row in zip(self.spans, self._schedule.stages, strict=True))

    @property
    def heads(self) -> list[Action | None]:
        rows = zip(self.spans, self._schedule.stages, strict=True)
        return [row[len(spans)] if len(spans) < len(row) else None for spans, row in rows]

    def advance(self) -> bool:
        """Every stage as far as it can go; whether any did."""
        moved = False
        for stage, row in enumerate(self._schedule.stages):
            spans = self.spans[stage]
            while len(spans) < len(row):
                action = row[len(spans)]
                ready = self._ready(stage, action)
                if ready is None:
                    break
                begin = max(ready, spans[-1][2] if spans else 0.0)
                spans.append((action, begin, begin + self._duration(action)))
                self._note(stage, action, spans[-1][2])
                moved = True
        return moved

    def _ready(self, stage: int, action: Action) -> float | None:
        """When everything that the action needs is there; None if it is not under way."""
        number, micro = self._schedule.number(stage, action.chunk), action.micro
        last = self._schedule.num_stages * self._schedule.num_chunks - 1
        match action.kind:
            case "forward":
                needs = [("forward", number - 1, micro)] if number else []
            case "backward_weight":
                needs = [("backward", number, micro)]
            case _:
                needs = [("forward", number, micro)]
                needs += [("backward", number + 1, micro)] if number < last else []
        ends = [self._end_of(need, number) for need in needs]
        return None if None in ends else max((end for end in ends if end is not None), default=0.0)

    def _end_of(self, need: tuple[str, int, int], number: int) -> float | None:
        end = self._done.get(need)
        is_own = need[1] % self._schedule.num_stages == number % self._schedule.num_stages
        return end if end is None or is_own else end + self._link

    def _note(self, stage: int, action: Action, end: float) -> None:
        if action.kind != "backward_weight":
            kind = "forward" if action.kind == "forward" else "backward"
            self._done[kind, self._schedule.number(stage, action.chunk), action.micro] = end


def most_in_flight(actions: tuple[Action, ...]) -> int:
    """The largest number of micro-batches, chunk by chunk, whose activations a stage keeps at the same time: from the
    forward pass to the gradients of parameters."""
    held = most = 0
    for action in actions:
        held += {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}[action.kind]
        most = max(most, held)
    return most
