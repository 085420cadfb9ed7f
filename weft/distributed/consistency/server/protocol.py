"""What workers and servers say to each other: the tags, and headers that are checked before they are believed.

worker                                     server
init   rank 0: weights, optimizer state
hello  wants weights                  -->
                                      <--  welcome  version, next step, weights, buffers
part   gradients, while backward runs -->
push   the rest, learning rate        -->
                                      <--  weights  version, next step, whether to stop
stop   wants all to stop              -->
end    takes no more steps            -->
sum    a small tensor, to be added    -->
                                      <--  total    when all have
pull   wants weights, now             -->
                                      <--  weights
fetch  wants the optimizer's state    -->
                                      <--  state
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["InitHeader", "MalformedError", "PushHeader", "Tag", "read_int", "server_address"]


class Tag(StrEnum):
    """What a message is about."""

    INIT = "init"
    HELLO = "hello"
    WELCOME = "welcome"
    PART = "part"
    PUSH = "push"
    WEIGHTS = "weights"
    STOP = "stop"
    END = "end"
    SUM = "sum"
    TOTAL = "total"
    PULL = "pull"
    FETCH = "fetch"
    STATE = "state"


class MalformedError(ValueError):
    """A message that does not say what it must."""


def server_address(num_workers: int, shard: int) -> int:
    """Workers have the addresses of their ranks; servers come after them."""
    return num_workers + shard


@dataclass(frozen=True)
class InitHeader:
    """How a training begins. `fraction` is the shard's part of all elements; `slots` are the (piece, name) of the
    optimizer state that follows the weights, and `num_buffers` come last."""

    run: int
    seed: int
    fraction: float
    num_pieces: int
    num_buffers: int
    slots: tuple[tuple[int, str], ...]
    updates: int  # that the optimizer has made before
    clip_norm: float | None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "slots": [list(slot) for slot in self.slots]}

    @staticmethod
    def read(header: Mapping[str, Any]) -> "InitHeader":
        slots = header.get("slots")
        if not isinstance(slots, list) or not all(
            isinstance(slot, list) and len(slot) == 2 and type(slot[0]) is int and isinstance(slot[1], str)
            for slot in slots
        ):
            raise MalformedError("slots")
        numbers = {key: read_int(header, key) for key in ("run", "seed", "num_pieces", "num_buffers", "updates")}
        limit = None if header.get("clip_norm") is None else _read_float(header, "clip_norm")
        pairs = tuple((index, name) for index, name in slots)
        return InitHeader(**numbers, fraction=_read_float(header, "fraction"), slots=pairs, clip_norm=limit)


@dataclass(frozen=True)
class PushHeader:
    """What belongs to a gradient. `absent` are the pieces without one; `wants` says whether weights are to be sent."""

    run: int
    step: int
    version: int  # of the weights that it was computed on, as the worker knows it
    lr: float
    weight: float
    absent: tuple[int, ...] = ()
    in_part: bool = False  # the tensors came before, under `part`
    wants: bool = True

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "absent": list(self.absent)}

    @staticmethod
    def read(header: Mapping[str, Any]) -> "PushHeader":
        absent, in_part, wants = header.get("absent"), header.get("in_part"), header.get("wants")
        if not isinstance(absent, list) or not all(type(index) is int for index in absent):
            raise MalformedError("absent")
        if not isinstance(in_part, bool) or not isinstance(wants, bool):
            raise MalformedError("in_part")
        weight = _read_float(header, "weight")
        if weight > 1:
            raise MalformedError("weight")
        run, step, version = (read_int(header, key) for key in ("run", "step", "version"))
        return PushHeader(run, step, version, _read_float(header, "lr"), weight, tuple(absent), in_part, wants)


def read_int(header: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 up."""
    value = header.get(key)
    if type(value) is not int or value < 0:
        raise MalformedError(key)
    return value


def _read_float(header: Mapping[str, Any], key: str) -> float:
    """A finite number from 0 up."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise MalformedError(key)
    return float(value)
