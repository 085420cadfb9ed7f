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

worker                                     host server                          server
push   all pieces, seed, how pieces   -->
       lie among shards
                                           forward  several, joined        -->
                                                                           <--  weights  who takes which step
                                      <--  weights
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

__all__ = [
    "ForwardHeader",
    "InitHeader",
    "MalformedError",
    "PushHeader",
    "Tag",
    "host_address",
    "read_int",
    "read_ints",
    "server_address",
    "with_absent",
]


class Tag(StrEnum):
    """What a message is about."""

    INIT = "init"
    HELLO = "hello"
    WELCOME = "welcome"
    PART = "part"
    PUSH = "push"
    FORWARD = "forward"
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


def host_address(num_workers: int, num_shards: int, host: int) -> int:
    """Host servers come after the servers."""
    return num_workers + num_shards + host


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
        in_part, wants = header.get("in_part"), header.get("wants")
        if not isinstance(in_part, bool) or not isinstance(wants, bool):
            raise MalformedError("in_part")
        weight, absent = _read_share(header), read_ints(header, "absent")
        run, step, version = (read_int(header, key) for key in ("run", "step", "version"))
        return PushHeader(run, step, version, _read_float(header, "lr"), weight, absent, in_part, wants)


@dataclass(frozen=True)
class ForwardHeader:
    """What belongs to gradients that a host server joined: whose they are, with the share of each."""

    run: int
    number: int  # of the forwarded pushes of this host server
    version: int  # of the shard's weights that it saw last
    lr: float
    parts: tuple[tuple[int, int, float], ...]  # rank, step, share of the batch
    absent: tuple[int, ...] = ()

    @property
    def pushes(self) -> tuple[tuple[int, int], ...]:
        return tuple((rank, step) for rank, step, _ in self.parts)

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "parts": [list(part) for part in self.parts], "absent": list(self.absent)}

    @staticmethod
    def read(header: Mapping[str, Any]) -> "ForwardHeader":
        parts = header.get("parts")
        if not isinstance(parts, list) or not parts or not all(isinstance(p, list) and len(p) == 3 for p in parts):
            raise MalformedError("parts")
        read = [dict(zip(("rank", "step", "weight"), part, strict=True)) for part in parts]
        found = tuple((read_int(p, "rank"), read_int(p, "step"), _read_share(p)) for p in read)
        if len({rank for rank, _, _ in found}) < len(found):
            raise MalformedError("parts")
        run, number, version = (read_int(header, key) for key in ("run", "number", "version"))
        return ForwardHeader(run, number, version, _read_float(header, "lr"), found, read_ints(header, "absent"))


def with_absent(tensors: Sequence[Tensor], absent: Sequence[int], num_pieces: int) -> tuple[Tensor | None, ...]:
    """The tensors at their places, None at the others."""
    if len(tensors) + len(set(absent)) != num_pieces:
        raise MalformedError("tensors")
    given = iter(tensors)
    return tuple(None if index in absent else next(given, None) for index in range(num_pieces))


def read_ints(header: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Whole numbers from 0 up."""
    values = header.get(key)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise MalformedError(key)
    return tuple(values)


def read_int(header: Mapping[str, Any], key: str) -> int:
    """A whole number from 0 up."""
    value = header.get(key)
    if type(value) is not int or value < 0:
        raise MalformedError(key)
    return value


def _read_share(header: Mapping[str, Any]) -> float:
    share = _read_float(header, "weight")
    if share > 1:
        raise MalformedError("weight")
    return share


def _read_float(header: Mapping[str, Any], key: str) -> float:
    """A finite number from 0 up."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise MalformedError(key)
    return float(value)
