"""The books of a run, which the desk of rank 0 keeps: what work is given out, who is left, what all of them add up."""

import math
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.consistency.pairs.protocol import Letter, Tag
from weft.distributed.consistency.server.protocol import MalformedError, read_int
from weft.distributed.mailbox import Message

__all__ = ["Books"]


@final
class Books:
    """Told of messages, answers with letters.

    Args:
        deals_work: work goes to whoever asks, and a fast rank takes more of it; else every rank has its own share of
            every batch. Then all stop after the same turn, for they wait for each other.
    """

    def __init__(self, size: int, *, deals_work: bool = True) -> None:
        self._size = size
        self._deals_work = deals_work
        self._run = -1
        self._next_work = 0
        self._first = 0
        self._stops_after = math.inf  # this turn; -1 for at once
        self._last_turn: dict[int, int] = {}
        self._sums: dict[int, dict[int, Tensor]] = {}
        self._gone: set[int] = set()
        self._early: list[Message] = []

    def take(self, message: Message) -> list[Letter]:
        """Raises MalformedError for what is no message of ours, or was here before."""
        run = read_int(message.header, "run")
        if message.tag == Tag.BEGIN and message.source == 0:
            return self._begin(run, read_int(message.header, "first"))
        if run > self._run:  # of a training that rank 0 is about to begin
            self._early.append(message)
            return []
        if run < self._run:
            raise MalformedError("run")
        match message.tag:
            case Tag.DEAL:
                return [self._deal(message.source, read_int(message.header, "turn"))]
            case Tag.STOP:
                latest = -1 if self._deals_work else max(self._last_turn.values(), default=0)
                self._stops_after = min(self._stops_after, latest)
                return []
            case Tag.SUM:
                return self._add(message.source, read_int(message.header, "number"), message)
            case _:
                raise MalformedError("tag")

    def lose(self, rank: int) -> list[Letter]:
        self._gone.add(rank)
        return self._complete_sums()

    def _begin(self, run: int, first: int) -> list[Letter]:
        self._run, self._first, self._next_work, self._stops_after = run, first, first, math.inf
        self._last_turn, self._sums = {}, {}
        early, self._early = self._early, []
        return [letter for message in early for letter in self.take(message)]

    def _deal(self, rank: int, turn: int) -> Letter:
        if turn <= self._last_turn.get(rank, -1):
            raise MalformedError("turn")
        self._last_turn[rank] = turn
        work = self._next_work if self._deals_work else self._first + turn * self._size + rank
        header = {"run": self._run, "turn": turn, "work": work, "stop": turn > self._stops_after}
        self._next_work += 1
        return Letter(rank, Tag.WORK, header)

    def _add(self, rank: int, number: int, message: Message) -> list[Letter]:
        parts = self._sums.setdefault(number, {})
        if len(message.tensors) != 1 or any(part.shape != message.tensors[0].shape for part in parts.values()):
            raise MalformedError("tensors")
        parts[rank] = message.tensors[0]
        return self._complete_sums()

    def _complete_sums(self) -> list[Letter]:
        awaited, letters = set(range(self._size)) - self._gone, []
        for number, parts in list(self._sums.items()):
            if parts and awaited <= parts.keys():
                total = add_in_order(parts)
                letters += [Letter(rank, Tag.TOTAL, {"run": self._run, "number": number}, [total]) for rank in parts]
                del self._sums[number]
        return letters


def add_in_order(parts: Mapping[int, Tensor]) -> Tensor:
    """In the order of ranks: the same bits whatever came first."""
    return torch.stack([parts[rank] for rank in sorted(parts)]).sum(0)
