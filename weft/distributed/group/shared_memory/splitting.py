"""Parts of a group: who belongs to which, and how they meet through the whole."""

from typing import final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractGroup
from weft.distributed.group.shared_memory.rendezvous import AbstractRendezvous, Invitation

__all__ = ["SplitRendezvous", "find_members"]


def find_members(group: AbstractGroup, colour: int, key: int) -> list[int]:
    """The ranks of `group` that gave this colour, ordered by key, then by rank. A collective call."""
    rows = _all_gather(group, [colour, key])
    chosen = [rank for rank in range(group.size) if rows[rank, 0] == colour]
    return sorted(chosen, key=lambda rank: (int(rows[rank, 1]), rank))


@final
class SplitRendezvous(AbstractRendezvous):
    """Invitations of all parts at once, in one all-gather of the whole group."""

    def __init__(self, group: AbstractGroup, leader: int) -> None:
        self._group = group
        self._leader = leader

    def publish(self, invitation: Invitation) -> None:
        _all_gather(self._group, [invitation.pid, invitation.start_time, invitation.descriptor])

    def fetch(self, deadline: float) -> Invitation | None:
        pid, start_time, descriptor = map(int, _all_gather(self._group, [0, 0, 0])[self._leader])
        return Invitation(pid, start_time, descriptor)

    def withdraw(self) -> None:
        pass


def _all_gather(group: AbstractGroup, row: list[int]) -> Tensor:
    rows = torch.empty(group.size, len(row), dtype=torch.int64)
    group.all_gather(rows, torch.tensor(row))
    return rows
