"""Checkpoints of a loop: states kept for its gradient, the others computed again (revolve: Griewank and Walther, 2000).

Backward takes the steps of a loop in reverse, and step i needs the state before it. With all n states kept that is
easy; with few, states are computed again from the nearest one that was kept. For n = 8 and 2 checkpoints:

    step       0  1  2  3  4  5  6  7      > taken    o taken from a state that is kept    < reversed
    forward    o  >  >  >  o  >  >  o      states 4 and 7 are kept; state 0, which the loop is given, is there anyway
                                    <      7; its place is free
                           o  o  <         6: from 4, keeping 5 on the way
                              <            5
                           <               4
               o  o  o  <                  3: from 0, keeping 1 and 2
                  ...

Backward takes each step again at most r times, where n < C(s + r + 1, s) and s = checkpoints + 1; no schedule with as
many places takes fewer. Memory is that of the checkpoints, not of the steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

__all__ = ["Action", "checkpoints_for", "draw_schedule", "first_checkpoints", "schedule"]


@dataclass(frozen=True)
class Action:
    """`keep` the state before a step, computed from the kept one before `begin`; or `reverse` a step, likewise.

    The steps from `begin` to `step` are taken again to get there, which may be none.
    """

    kind: str  # "keep" or "reverse"
    step: int
    begin: int


def checkpoints_for(num_steps: int) -> int:
    """As many as let backward take each step again at most once: about the square root of 2n."""
    places = 1
    while comb(places + 2, 2) - 1 < num_steps:
        places += 1
    return places - 1


def first_checkpoints(num_steps: int, checkpoints: int) -> list[int]:
    """The states that forward keeps on its way.

    They cut the loop into parts, the last of which has one place, the one before it two, and so on. A part of p places
    and C(p + r, p) steps takes each again at most r times; so all parts get as many steps as some r allows.
    """
    places, repeats = checkpoints + 1, 0
    while comb(places + repeats + 1, places) - 1 < num_steps:
        repeats += 1
    fewest = {p: comb(p + repeats - 1, p) if repeats else 0 for p in range(places, 0, -1)}
    rest, kept, begin = num_steps - sum(fewest.values()), list[int](), 0
    for p, length in fewest.items():
        more = min(rest, comb(p + repeats, p) - length)
        begin, rest = begin + length + more, rest - more
        if begin < num_steps:
            kept.append(begin)
    return kept


def schedule(num_steps: int, checkpoints: int) -> Iterator[Action]:
    """The actions of backward, in order, after a forward pass that kept `first_checkpoints`.

    A state that was kept is let go when its own step has been reversed.
    """
    kept = [0, *first_checkpoints(num_steps, checkpoints)]
    end = num_steps
    while kept and end:
        begin = kept[-1]
        free = checkpoints + 1 - len(kept)
        if end - begin > 1 and free:
            state = begin + _split(end - begin, free + 1)
            yield Action("keep", state, begin)
            kept.append(state)
            continue
        end -= 1
        yield Action("reverse", end, begin)
        if end == begin:
            kept.pop()


def draw_schedule(num_steps: int, checkpoints: int) -> str:
    """Draw which states a loop keeps and which its backward computes again: `>` taken, `o` kept, `<` reversed.

    >>> print(draw_schedule(4, 1))
    step       0  1  2  3
    forward    o  >  >  o
                        <
               o  o  <
                  <
               <
    """
    kept = {0, *first_checkpoints(num_steps, checkpoints)}
    rows = [f"step     {''.join(f'{step:3}' for step in range(num_steps))}"]
    rows.append(f"forward  {''.join('  o' if step in kept else '  >' for step in range(num_steps))}")
    waiting: dict[int, str] = {}
    for action in schedule(num_steps, checkpoints):
        waiting |= {step: "o" if step == action.begin else ">" for step in range(action.begin, action.step)}
        if action.kind == "reverse":
            waiting[action.step] = "<"
            row = "".join(f"  {waiting.get(step, ' ')}" for step in range(num_steps))
            rows.append(f"         {row}".rstrip())
            waiting = {}
    return "\n".join(rows)


def _split(num_steps: int, places: int) -> int:
    """The number of steps, of two or more, before the next state to keep, where one place is the first state's.

    Left of it, `places` places and one repetition less must do; right of it, one place less.
    """
    repeats = 1
    while comb(places + repeats, places) < num_steps:
        repeats += 1
    fewest = max(1, num_steps - comb(places - 1 + repeats, places - 1))
    return min(num_steps - 1, max(fewest, comb(places + repeats - 2, places) if repeats > 1 else 1))
