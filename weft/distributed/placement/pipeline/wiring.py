"""Which value goes from which chunk to which: the edges of a partition.

    chunk 0 --h1--> chunk 1 --h2--> chunk 2         edges   (h1, 0, 1)  (h2, 1, 2)  (skip, 0, 2)
        `----------- skip ------------^                     (random, 0, 1)  (random, 1, 2)

Beside the values that modules pass, the state of a micro-batch's generators goes from each chunk to the next, so that
dropout draws what it draws in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

from weft.distributed.placement.pipeline.stages import INPUT, StageProgram
from weft.errors import UsageError

__all__ = ["RANDOM", "Edge", "Wiring"]

RANDOM = "random"


@dataclass(frozen=True)
class Edge:
    """A value on its way from the chunk that makes it to one that needs it; chunks are counted over all stages."""

    index: int
    value: str
    producer: int
    consumer: int


@final
@dataclass(frozen=True)
class Wiring:
    """The edges of all chunks, numbered in the same way on every rank."""

    programs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # (inputs, outputs) of each chunk

    @staticmethod
    def of(programs: Sequence[StageProgram]) -> "Wiring":
        return Wiring(tuple((program.inputs, program.outputs) for program in programs))

    @property
    def num_chunks(self) -> int:
        return len(self.programs)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        made_by = {value: number for number, (_, outputs) in enumerate(self.programs) for value in outputs}
        found: list[Edge] = []
        for consumer, (inputs, _) in enumerate(self.programs):
            for value in dict.fromkeys(inputs):
                if value.startswith(INPUT):
                    continue
                producer = made_by.get(value, consumer)
                if producer >= consumer:
                    raise UsageError(
                        f"no stage before it makes a value (value: {value}, stage: {consumer}); cut the model elsewhere"
                    )
                found.append(Edge(len(found), value, producer, consumer))
            if consumer:
                found.append(Edge(len(found), RANDOM, consumer - 1, consumer))
        return tuple(found)

    def into(self, number: int) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.consumer == number)

    def out_of(self, number: int) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.producer == number)
