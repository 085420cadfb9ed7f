"""Keys of random draws: one for every rank, tensor and message, so that errors of ranks and steps are independent."""

import zlib
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.codec import Kept
from weft.distributed.codecs.kernels import derive_key
from weft.distributed.codecs.packing import Bucket, Piece

__all__ = ["MessageCounter"]

MESSAGES = "messages"
"""In the memory of a codec: how many messages of a bucket it has encoded."""


@final
class MessageCounter:
    """Counts the messages of each bucket. A checkpoint holds one number for all: each is sent once in a step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._first = 0
        self._counts: dict[tuple[Piece, ...], int] = {}

    def next(self, bucket: Bucket) -> int:
        """The number of the message that is encoded now, 0 for the first."""
        number = self._counts.get(bucket.pieces, self._first)
        self._counts[bucket.pieces] = number + 1
        return number

    def next_key(self, bucket: Bucket) -> int:
        """Of the message that is encoded now, on this rank."""
        return self.key(bucket, self.next(bucket), self._rank)

    @staticmethod
    def key(bucket: Bucket, number: int, rank: int) -> int:
        """By the first piece, as buckets may be cut in other ways on another number of ranks."""
        first = bucket.pieces[0]
        return derive_key(zlib.crc32(first.name.encode()), first.begin, number, rank)

    def memory(self) -> dict[str, Kept]:
        count = max([self._first, *self._counts.values()])
        return {MESSAGES: Kept(torch.tensor(count), "global")} if count else {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._counts = {}
        self._first = int(memory[MESSAGES]) if MESSAGES in memory else 0
