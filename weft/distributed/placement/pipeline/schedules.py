"""The orders of micro-batches: GPipe, 1F1B, interleaved, zero bubble, PipeDream. Pure functions.

    n stages, m micro-batches, a forward pass of 1 and a backward pass of 2

                    idle share                 micro-batches in flight at stage s
    gpipe           (n-1) / (m+n-1)            m
    1f1b            (n-1) / (m+n-1)            min(m, n-s)
    interleaved     (n-1) / (v*m+n-1)          min(v*m, 2(n-s-1) + (v-1)n + 1) chunks, of v to a stage
    zero_bubble     (n-1) / (3*m+n-1)          min(m, n)

The share of interleaved is that for m a multiple of n, and that of zero_bubble for m of n or more.

References: Huang et al. (2019); Narayanan et al. (2019, 2021); Qi et al. (2024), ZB-H1.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from weft.distributed.placement.pipeline.actions import Action, Kind, Schedule
from weft.specs.plan import Choice

__all__ = ["gpipe", "interleaved", "one_forward_one_backward", "pipedream", "stream", "zero_bubble"]

MICRO = 8
"""Micro-batches where a plan does not say."""


def gpipe(num_stages: int, choice: Choice) -> Schedule:
    """All forward passes, then all backward passes."""
    num_micro = int(choice.get("micro", MICRO))
    actions = (*_passes("forward", num_micro), *_passes("backward", num_micro))
    return Schedule((actions,) * num_stages, num_micro)


def one_forward_one_backward(num_stages: int, choice: Choice) -> Schedule:
    """A backward pass as soon as there is one, so that a stage holds few micro-batches."""
    num_micro = int(choice.get("micro", MICRO))
    stages = (_one_by_one(min(num_micro, num_stages - stage), num_micro) for stage in range(num_stages))
    return Schedule(tuple(stages), num_micro)


def pipedream(num_stages: int, choice: Choice) -> Schedule:
    """The first micro-batches of `stream`, to be drawn: the pipeline is never emptied."""
    return one_forward_one_backward(num_stages, replace(choice, parameters=(("micro", 3 * num_stages),)))


def stream(num_stages: int, stage: int) -> Iterator[Action]:
    """The actions of a stage whose pipeline is never emptied: n - s forward passes, then one backward, one forward."""
    ahead = num_stages - stage
    for micro in range(ahead):
        yield Action("forward", 0, micro)
    for micro in count():
        yield Action("backward", 0, micro)
        yield Action("forward", 0, micro + ahead)


def interleaved(num_stages: int, choice: Choice) -> Schedule:
    """Every stage has several chunks of layers: the pipeline fills with passes of a part of the time.

    Micro-batches go in rounds of as many as there are stages; each chunk does a round before the next chunk does:

        2 stages, 2 chunks, 4 micro-batches (A B | C D)     stage 0   A B A' B' C D a' C' b' D' a ...

    A last round that is not full is one whose missing micro-batches take no time.
    """
    num_micro, num_chunks = int(choice.get("micro", MICRO)), int(choice.get("chunks", 2))
    rounds = [range(begin, begin + num_stages) for begin in range(0, num_micro, num_stages)]
    forward = [(chunk, micro) for group in rounds for chunk in range(num_chunks) for micro in group]
    backward = [(chunk, micro) for group in rounds for chunk in reversed(range(num_chunks)) for micro in group]
    stages = []
    for stage in range(num_stages):
        ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages + 1
        full = _merge(forward, backward, min(ahead, len(forward)))
        stages.append(tuple(action for action in full if action.micro < num_micro))
    return Schedule(tuple(stages), num_micro, num_chunks)


def zero_bubble(num_stages: int, choice: Choice) -> Schedule:
    """1F1B, but gradients of parameters are put off, to fill the time at the end: ZB-H1, with the memory of 1F1B.

    3 stages, 4 micro-batches; small letters gradients of inputs, w those of parameters

    stage 0   A B C a w D b w c w d w               a micro-batch is let go when its w is done: stage s puts off s of
    stage 1     A B a C b w D c w d w w             them, beside the n - s that are on their way
    stage 2       A a B b C c w D d w w w
    """
    num_micro = int(choice.get("micro", MICRO))
    stages = []
    for stage in range(num_stages):
        ahead = min(num_micro, num_stages - stage)
        actions = _passes("forward", ahead)
        for micro in range(num_micro):
            actions.append(Action("backward_input", 0, micro))
            if micro >= stage:
                actions.append(Action("backward_weight", 0, micro - stage))
            if micro + ahead < num_micro:
                actions.append(Action("forward", 0, micro + ahead))
        actions += [Action("backward_weight", 0, micro) for micro in range(max(0, num_micro - stage), num_micro)]
        stages.append(tuple(actions))
    return Schedule(tuple(stages), num_micro)


def _passes(kind: Kind, num_micro: int) -> list[Action]:
    return [Action(kind, 0, micro) for micro in range(num_micro)]


def _one_by_one(ahead: int, num_micro: int) -> tuple[Action, ...]:
    order = [(0, micro) for micro in range(num_micro)]
    return _merge(order, order, ahead)


def _merge(forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int) -> tuple[Action, ...]:
    """So many forward passes, then a backward and a forward pass in turn, then the backward passes that are left."""
    actions = [Action("forward", *one) for one in forward[:ahead]]
    for i, one in enumerate(backward):
        actions.append(Action("backward", *one))
        actions += [Action("forward", *next_one) for next_one in forward[ahead + i : ahead + i + 1]]
    return tuple(actions)
