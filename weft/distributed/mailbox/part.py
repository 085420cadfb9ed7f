"""A mailbox that knows some of the peers alone, by numbers of their own.

    members   (1, 3, 6)           0 is who others know as 1, 1 who they know as 3, and so on
    world     0  1  2  3  4  5  6

Where a model lies in parts, the workers and servers of each part talk among themselves, as if there were no others.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox.mailbox import (
    FOREVER,
    AbstractMailbox,
    AbstractReceive,
    Header,
    Into,
    Message,
    Sources,
    Tags,
)

__all__ = ["PartMailbox"]


@final
class PartMailbox(AbstractMailbox):
    """Passes every call on, with addresses of the whole.

    Args:
        members: the addresses of the peers in the whole, in the order of their numbers here; the own one among them.
    """

    def __init__(self, inner: AbstractMailbox, members: Sequence[int]) -> None:
        self._inner = inner
        self._members = tuple(members)
        self._numbers = {address: number for number, address in enumerate(self._members)}
        self.address, self.incarnation, self.clock = self._numbers[inner.address], inner.incarnation, inner.clock

    def start_send(self, to: int, tag: str, header: Header = None, tensors: Sequence[Tensor] = ()) -> AbstractWork:
        return self._inner.start_send(self._members[to], tag, header, tensors)

    def start_receive(self, tag: Tags = None, source: Sources = None, *, into: Into = None) -> AbstractReceive:
        """Of nobody else, also where any source will do. The own address is among these, which is never lost."""
        wanted = range(len(self._members)) if source is None else (source,) if isinstance(source, int) else source
        asked = self._inner.start_receive(tag, [self._members[number] for number in wanted], into=into)
        return _PartReceive(asked, self._numbers)

    def peers(self) -> dict[int, int]:
        return {self._numbers[peer]: found for peer, found in self._inner.peers().items() if peer in self._numbers}

    def await_peers(self, addresses: Collection[int], deadline: float = FOREVER) -> None:
        self._inner.await_peers([self._members[number] for number in addresses], deadline)

    def follow_peers(self) -> None:
        self._inner.follow_peers()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def refusals(self) -> dict[str, int]:
        return self._inner.refusals()

    def close(self) -> None:
        self._inner.close()


@final
class _PartReceive(AbstractReceive):
    def __init__(self, inner: AbstractReceive, numbers: dict[int, int]) -> None:
        self._inner = inner
        self._numbers = numbers

    def wait(self, deadline: float = FOREVER) -> Message:
        message = self._inner.wait(deadline)
        return replace(message, source=self._numbers[message.source])

    def is_done(self) -> bool:
        return self._inner.is_done()

    def cancel(self) -> None:
        self._inner.cancel()
