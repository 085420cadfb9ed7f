"""An arena: values that are not alive at the same time share memory, by a plan that is made once.

time  -->   0    1    2    3    4
offset  0   [ mm      ]    [ sum  ]
       64        [ relu          ]
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

__all__ = ["ALIGNMENT", "Arena", "Lifetime", "assign_offsets"]

ALIGNMENT = 64  # bytes; what torch's own allocator promises, and kernels may round differently elsewhere


class Arena:
    """Memory that several programs use, one at a time: as much as the largest of them wants."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int) -> Tensor:
        """The memory, made anew if it is too small; programs that used the old one are then to take the new one."""
        if len(self.memory) < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self.memory


@dataclass(frozen=True)
class Lifetime:
    """The first and the last call, both included, for which a value needs its bytes."""

    first: int
    last: int
    num_bytes: int


def assign_offsets(lifetimes: Mapping[fx.Node, Lifetime]) -> tuple[dict[fx.Node, int], int]:
    """An offset for each value, and the size of the arena: in order of time, each takes the hole that fits it best.

    The hole that fits best was often left last, so what is written next is likely to be in the cache still.
    """
    offsets: dict[fx.Node, int] = {}
    holes: dict[int, int] = {}  # offset -> end
    ending: dict[int, list[fx.Node]] = {}
    size, now = 0, -1
    for node, lifetime in sorted(lifetimes.items(), key=lambda item: item[1].first):
        for time in range(now, lifetime.first):
            for done in ending.pop(time, ()):
                _release(holes, offsets[done], offsets[done] + _rounded(lifetimes[done].num_bytes))
        now, wanted = lifetime.first, _rounded(lifetime.num_bytes)
        fitting = [(end - begin, begin) for begin, end in holes.items() if end - begin >= wanted]
        if fitting:
            _, begin = min(fitting)
            end = holes.pop(begin)
            if end - begin > wanted:
                holes[begin + wanted] = end
        else:
            begin = next((hole for hole, end in holes.items() if end == size), size)
            holes.pop(begin, None)
            size = begin + wanted
        offsets[node] = begin
        ending.setdefault(lifetime.last, []).append(node)
    return offsets, size


def _release(holes: dict[int, int], begin: int, end: int) -> None:
    """A new hole, together with the holes beside it."""
    if end in holes:
        end = holes.pop(end)
    for other, other_end in holes.items():
        if other_end == begin:
            holes[other] = end
            return
    holes[begin] = end


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
