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

server                                     server of another shard
norms  of its tensors in a round      -->  where the sum of all shards is clipped

worker                                     host server                          server
push   all pieces, seed, how pieces   -->
       lie among shards
                                           forward  several, joined        -->
                                                                           <--  weights  who takes which step
                                      <--  weights
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from weft.distributed.consistency.control import (
    STOP,
    SUM,
    TOTAL,
    MalformedError,
    read_float,
    read_int,
    read_ints,
)

__all__ = ["ForwardHeader", "InitHeader", "PushHeader", "Tag", "with_absent"]


class Tag(StrEnum):
    """What a message is about."""

    INIT = "init"
    HELLO = "hello"
    WELCOME = "welcome"
    PART = "part"
    PUSH = "push"
    FORWARD = "forward"
    WEIGHTS = "weights"
    STOP = STOP
    END = "end"
    SUM = SUM
    TOTAL = TOTAL
    PULL = "pull"
    FETCH = "fetch"
    STATE = "state"
    NORMS = "norms"


@dataclass(frozen=True)
class InitHeader:
    """How a training begins. `fraction` is the shard's part of all elements; `slots` are the (piece, name) of the
    optimizer state that follows the weights, and `num_buffers` come last. `positions` are those of the pieces among all
    tensors of the model, where shards clip their sums together."""

    run: int
    seed: int
    fraction: float
    num_pieces: int
    num_buffers: int
    slots: tuple[tuple[int, str], ...]
    updates: int  # that the optimizer has made before
    clip_norm: float | None
    positions: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "slots": [list(slot) for slot in self.slots], "positions": list(self.positions)}

    @staticmethod
    def read(header: Mapping[str, Any]) -> "InitHeader":
        slots = header.get("slots")
        if not isinstance(slots, list) or not all(
            isinstance(slot, list) and len(slot) == 2 and type(slot[0]) is int and isinstance(slot[1], str)
            for slot in slots
        ):
            raise MalformedError("slots")
        numbers = {key: read_int(header, key) for key in ("run", "seed", "num_pieces", "num_buffers", "updates")}
        limit = None if header.get("clip_norm") is None else read_float(header, "clip_norm")
        positions = read_ints(header, "positions")
        if len(positions) not in (0, numbers["num_pieces"]):
            raise MalformedError("positions")
        pairs, fraction = tuple((index, name) for index, name in slots), read_float(header, "fraction")
        return InitHeader(**numbers, fraction=fraction, slots=pairs, clip_norm=limit, positions=positions)


@dataclass(frozen=True)
class PushHeader:
    """What belongs to a gradient. `absent` are the pieces without one; `wants` says whether weights are to be sent;
    `loss` is this rank's part of that of the batch, where all ranks are to know it."""

    run: int
    step: int
    version: int  # of the weights that it was computed on, as the worker knows it
    lr: float
    weight: float
    absent: tuple[int, ...] = ()
    in_part: bool = False  # the tensors came before, under `part`
    wants: bool = True
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        # As text: JSON has no number that is none.
        return {**self.__dict__, "absent": list(self.absent), "loss": None if self.loss is None else self.loss.hex()}

    @staticmethod
    def read(header: Mapping[str, Any]) -> "PushHeader":
        in_part, wants = header.get("in_part"), header.get("wants")
        if not isinstance(in_part, bool) or not isinstance(wants, bool):
            raise MalformedError("in_part")
        weight, absent = read_float(header, "weight", most=1), read_ints(header, "absent")
        run, step, version = (read_int(header, key) for key in ("run", "step", "version"))
        return PushHeader(
            run, step, version, read_float(header, "lr"), weight, absent, in_part, wants, _read_loss(header)
        )


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
        found = tuple((read_int(p, "rank"), read_int(p, "step"), read_float(p, "weight", most=1)) for p in read)
        if len({rank for rank, _, _ in found}) < len(found):
            raise MalformedError("parts")
        run, number, version = (read_int(header, key) for key in ("run", "number", "version"))
        return ForwardHeader(run, number, version, read_float(header, "lr"), found, read_ints(header, "absent"))


def with_absent(tensors: Sequence[Tensor], absent: Sequence[int], num_pieces: int) -> tuple[Tensor | None, ...]:
    """The tensors at their places, None at the others."""
    if len(tensors) + len(set(absent)) != num_pieces:
        raise MalformedError("tensors")
    given = iter(tensors)
    return tuple(None if index in absent else next(given, None) for index in range(num_pieces))


def _read_loss(header: Mapping[str, Any]) -> float | None:
    text = header.get("loss")
    try:
        return None if text is None else float.fromhex(text)
    except (TypeError, ValueError):
        raise MalformedError("loss") from None
