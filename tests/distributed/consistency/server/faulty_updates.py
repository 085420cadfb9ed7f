"""Faults to plant in a shard's updates, as `monkeypatch.setattr(Shard, "_update", ...)`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from weft.distributed.consistency.server import Shard

true_update = Shard._update


def twice(shard: Shard, *given: Any) -> None:
    true_update(shard, *given)
    true_update(shard, *given)


def never(shard: Shard, *given: Any) -> None:
    pass


def not_the_fourth(shard: Shard, *given: Any) -> None:
    """Right, but for one update in the middle."""
    if shard.version != 3:
        true_update(shard, *given)


def forgetful(shard: Shard, *given: Any) -> None:
    true_update(shard, *given)
    shard.state = shard._optimizer.init(shard._pieces)


def too_fast(shard: Shard, total: Mapping[str, Tensor | None], factor: float, lr: float) -> None:
    true_update(shard, total, 1.01 * factor, lr)


FAULTY_UPDATES = {
    "an update made twice": twice,
    "no update made": never,
    "one update left out": not_the_fourth,
    "lost momentum": forgetful,
    "a wrong learning rate": too_fast,
}
