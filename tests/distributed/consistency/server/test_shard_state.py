"""Weights under way: who reads what, and what may be used again."""

from typing import final

import torch

from weft.distributed.consistency.server.shard_state import InFlight
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
    in_flight, weights, works = InFlight(), (torch.zeros(2),), [Sending(), Sending()]
    assert not in_flight.is_read(weights)
    for work in works:
        in_flight.add(weights, work)
    works[0].wait()
    assert in_flight.is_read(weights)
    works[1].wait()
    assert not in_flight.is_read(weights)
    assert in_flight.take_free() is None  # they are the shard's own


def test_memory_that_was_read_is_used_again() -> None:
    in_flight, old, new, work = InFlight(), (torch.zeros(2),), (torch.zeros(2),), Sending()
    in_flight.add(old, work)
    assert not in_flight.is_read(new) and in_flight.take_free() is None
    work.wait()
    assert not in_flight.is_read(new)
    assert in_flight.take_free() is old and in_flight.take_free() is None
