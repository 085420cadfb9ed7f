"""The messages of workers and servers: the tags, and headers that are checked before they are believed.

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
       lie among shards, and what they
       are where they travel encoded
                                           forward  several, joined        -->
                                                                           <--  weights  who takes which step
                                      <--  weights
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from weft.distributed.codecs import Bucket, Piece
from weft.distributed.consistency.control import STOP, SUM, TOTAL, MalformedError, read_header
from weft.distributed.mailbox.payload import DTYPES

__all__ = ["ForwardHeader", "InitHeader", "PushHeader", "Tag", "describe", "read_layout", "with_absent"]


class Tag(StrEnum):
    """The kind of a message."""

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

    @staticmethod
    def read(header: Mapping[str, Any]) -> "InitHeader":
        found = read_header(InitHeader, header)
        if len(found.positions) not in (0, found.num_pieces):
            raise MalformedError("positions")
        return found


@dataclass(frozen=True)
class PushHeader:
    """The header of a gradient. `absent` are the pieces without one; `wants` says whether weights are to be sent;
    `loss` is this rank's part of that of the batch, where all ranks are to know it: in hexadecimal, as JSON has no
    number that is none. `settings` are those that a script has changed in its optimizer, as JSON of its own."""

    run: int
    step: int
    version: int  # of the weights that it was computed on, as the worker knows it
    lr: float
    weight: float
    absent: tuple[int, ...] = ()
    in_part: bool = False  # the tensors came before, under `part`
    wants: bool = True
    loss: str | None = None
    settings: str | None = None

    @staticmethod
    def read(header: Mapping[str, Any]) -> "PushHeader":
        found = read_header(PushHeader, header)
        try:
            float.fromhex(found.loss or "0")
        except (ValueError, OverflowError):
            raise MalformedError("loss") from None
        _check_settings(found.settings)
        if found.weight > 1:
            raise MalformedError("weight")
        return found


@dataclass(frozen=True)
class ForwardHeader:
    """The header of gradients that a host server joined: whose they are, with the share of each."""

    run: int
    number: int  # of the forwarded pushes of this host server
    version: int  # of the shard's weights that it saw last
    lr: float
    parts: tuple[tuple[int, int, float], ...]  # rank, step, share of the batch
    absent: tuple[int, ...] = ()
    settings: str | None = None

    @property
    def pushes(self) -> tuple[tuple[int, int], ...]:
        return tuple((rank, step) for rank, step, _ in self.parts)

    @staticmethod
    def read(header: Mapping[str, Any]) -> "ForwardHeader":
        found = read_header(ForwardHeader, header)
        _check_settings(found.settings)
        ranks = {rank for rank, _, share in found.parts if share <= 1}
        if not ranks or len(ranks) < len(found.parts):
            raise MalformedError("parts")
        return found


def _check_settings(settings: str | None) -> None:
    """Rows of optimizer, group, key and value."""
    try:
        rows = json.loads(settings or "[]")
    except ValueError:
        raise MalformedError("settings") from None
    kinds = [int, int, str]
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == 4 and list(map(type, row[:3])) == kinds for row in rows
    ):
        raise MalformedError("settings")


def with_absent(tensors: Sequence[Tensor], absent: Sequence[int], num_pieces: int) -> tuple[Tensor | None, ...]:
    """The tensors at their places, None at the others."""
    if len(tensors) + len(set(absent)) != num_pieces:
        raise MalformedError("tensors")
    given = iter(tensors)
    return tuple(None if index in absent else next(given, None) for index in range(num_pieces))


def describe(buckets: Sequence[Bucket]) -> list[list[Any]]:
    """Type and shape of each piece, for a host server, which decodes what it joins."""
    return [[str(bucket.dtype).removeprefix("torch."), *bucket.shapes[0]] for bucket in buckets]


def read_layout(header: Mapping[str, Any]) -> tuple[Bucket, ...]:
    """The inverse of `describe`; pieces go by their numbers."""
    found = header.get("layout")
    if not isinstance(found, list) or not all(isinstance(one, list) and one and one[0] in DTYPES for one in found):
        raise MalformedError("layout")
    if not all(type(dim) is int and dim >= 0 for one in found for dim in one[1:]):
        raise MalformedError("layout")
    shapes = [tuple(one[1:]) for one in found]
    pieces = [Piece(str(index), 0, math.prod(shape)) for index, shape in enumerate(shapes)]
    return tuple(
        Bucket((piece,), (shape,), DTYPES[one[0]]) for piece, shape, one in zip(pieces, shapes, found, strict=True)
    )
