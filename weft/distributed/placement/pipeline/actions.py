"""Schedules of a pipeline as data: what every stage does with which micro-batch, in which order.

    1f1b, 4 stages, 4 micro-batches; small letters are backward passes

    stage 0   A B C D             a     b     c     d
    stage 1     A B C         a   D b     c     d
    stage 2       A B     a   C b   D c     d
    stage 3         A a   B b   C c   D d

With several chunks a stage has several runs of layers, and a micro-batch comes by as often: of n stages, chunk c of
stage s is number c * n + s of all of them.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Action", "Kind", "Schedule"]

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one micro-batch through a chunk of a stage.

    `backward` makes both gradients; `backward_input` the one that the stage before waits for, and `backward_weight`
    those of parameters, for which nobody waits.
    """

    kind: Kind
    chunk: int
    micro: int


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in their order."""

    stages: tuple[tuple[Action, ...], ...]
    num_micro: int
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def number(self, stage: int, chunk: int) -> int:
        """The place of a chunk among those of all stages."""
        return chunk * self.num_stages + stage
