"""A schedule drawn in the terminal: a row for each stage, time from left to right.

stage 0  0 1     0---2 1---  2---        a forward pass of micro-batch 1 is   1
stage 1    0 0---1 1---2 2---            a backward pass, twice as long,      1---
"""

from weft.distributed.placement.pipeline.actions import Action, Schedule
from weft.distributed.placement.pipeline.timeline import DURATIONS, most_in_flight, play

__all__ = ["draw", "legend"]

MARKS = {"forward": " ", "backward": "-", "backward_input": "<", "backward_weight": "w"}
"""Fills the cells of an action after its micro-batch's number."""


def draw(schedule: Schedule) -> list[str]:
    """A line for each stage. A forward pass is one unit of time, a backward pass two; chunks share them.

    >>> from weft.distributed.placement.pipeline.schedules import one_forward_one_backward
    >>> from weft.specs.plan import Choice
    >>> print(*draw(one_forward_one_backward(2, Choice("1f1b", (("micro", 2),)))), sep="|\\n")
    stage 0  0 1     0---  1---|
    stage 1    0 0---1 1---
    """
    width = max(2, len(_label(Action("forward", schedule.num_chunks - 1, schedule.num_micro - 1), schedule)) + 1)
    rows = play(schedule, {kind: duration * schedule.num_chunks for kind, duration in DURATIONS.items()}).spans
    name = len(f"stage {schedule.num_stages - 1}")
    lines = []
    for stage, spans in enumerate(rows):
        line = ""
        for action, begin, end in spans:
            line = line.ljust(round(begin) * width)
            line += _label(action, schedule).ljust(round(end - begin) * width, MARKS[action.kind])
        lines.append(f"{f'stage {stage}'.ljust(name)}  {line}".rstrip())
    return lines


def _label(action: Action, schedule: Schedule) -> str:
    """The number of the micro-batch, and of the chunk where there are several, as a letter.

    >>> _label(Action("forward", 1, 3), Schedule((), 8, 2))
    '3b'
    """
    return f"{action.micro}{_letter(action.chunk) if schedule.num_chunks > 1 else ''}"


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk % 26)


def legend(schedule: Schedule) -> list[str]:
    """The meaning of the drawing, and its numbers: idle share, and micro-batches in flight."""
    kinds = {action.kind for row in schedule.stages for action in row}
    words = {
        "forward": "3 forward",
        "backward": "3--- backward",
        "backward_input": "3< gradient of the input",
        "backward_weight": "3w gradients of parameters",
    }
    shown = ", ".join(text for kind, text in words.items() if kind in kinds)
    chunks = "; a letter is a chunk of a stage's layers" if schedule.num_chunks > 1 else ""
    in_flight = [most_in_flight(row) for row in schedule.stages]
    unit = "chunks of micro-batches" if schedule.num_chunks > 1 else "micro-batches"
    return [
        f"of micro-batch 3: {shown}{chunks}",
        f"idle {play(schedule).idle_share:.1%} of the time, if forward takes 1 and backward 2",
        f"in flight: {', '.join(map(str, in_flight))} {unit}",
    ]
