"""Decisions that ranks take together although they do not meet in every step."""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group.calls import AllReduce
from weft.distributed.group.group import AbstractGroup, AbstractWork

__all__ = ["PERIOD", "Agreement"]

PERIOD = 8
"""Steps between two votes."""


@final
class Agreement:
    """Votes that are under way while the ranks go on; each is read, by all after the same step, one period later.

        step       8                 16                24
        vote 1     cast ~~~~~~~~~~~> counted
        vote 2                       cast ~~~~~~~~~~~> counted

    So a rank waits for another only where that is more than a period behind. Each question has votes of its own.
    """

    def __init__(self, group: AbstractGroup, period: int = PERIOD) -> None:
        self._group = group
        self._period = period
        self._cast: dict[str, tuple[Tensor, AbstractWork]] = {}

    def ask(self, question: str, step: int, wish: bool) -> bool:
        """Whether a rank wished it when the last vote was cast; all ranks ask the same questions in the same order."""
        if step % self._period:
            return False
        before = self._cast.get(question)
        answer = False
        if before is not None:
            ballot, work = before
            work.wait()
            answer = bool(ballot.item())
        # A wish that was granted is not carried into the next vote.
        ballot = torch.tensor([float(wish and not answer)])
        self._cast[question] = ballot, self._group.start(AllReduce(ballot))
        return answer

    def settle(self) -> None:
        """Wait for the votes under way, which are counted when their time comes."""
        for _, work in self._cast.values():
            work.wait()
