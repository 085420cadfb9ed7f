"""Weights under way: who reads what, and what may be used again."""

from typing import final

import torch

from weft.distributed.consistency.server.lent import Lent
from weft.distributed.group.group import AbstractWork


@final
class Sending(AbstractWork):
    def __init__(self) -> None:
        self.is_over = False

    def wait(self) -> None:
        self.is_over = True

    def is_done(self) -> bool:
        return self.is_over


def test_weights_are_read_until_every_worker_has_them() -> None:
    lent, weights, works = Lent(), (torch.zeros(2),), [Sending(), Sending()]
    assert not lent.is_read(weights)
    for work in works:
        lent.lend(weights, work)
    works[0].wait()
    assert lent.is_read(weights)
    works[1].wait()
    assert not lent.is_read(weights)
    assert lent.take_free() is None  # they are the shard's own


def test_memory_that_was_read_is_used_again() -> None:
    lent, old, new, work = Lent(), (torch.zeros(2),), (torch.zeros(2),), Sending()
    lent.lend(old, work)
    assert not lent.is_read(new) and lent.take_free() is None
    work.wait()
    assert not lent.is_read(new)
    assert lent.take_free() is old and lent.take_free() is None
