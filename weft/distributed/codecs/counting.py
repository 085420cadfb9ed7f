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


@final
class MessageCounter:
    """Counts the messages of each bucket. A checkpoint holds the counts by the first tensor of a bucket: in a script
    some models have more steps than others. Of a bucket that begins with another one, as ranks that are more or fewer
    may have it, the largest of them goes on.

    Args:
        rank: whose draws these are.
        use: the word for what is counted, in the memory of a codec.
    """

    def __init__(self, rank: int, use: str = "messages") -> None:
        self._rank, self._use = rank, use
        self._counts: dict[tuple[Piece, ...], int] = {}
        self._restored: dict[str, int] = {}

    def next(self, bucket: Bucket) -> int:
        """The number of the message that is encoded now, 0 for the first."""
        number = self._counts.get(bucket.pieces)
        if number is None:
            number = self._restored.get(_first_name(bucket), max(self._restored.values(), default=0))
        self._counts[bucket.pieces] = number + 1
        return number

    def next_key(self, bucket: Bucket) -> int:
        """Of the message that is encoded now, on this rank."""
        return self.key(bucket, self.next(bucket), self._rank)

    @staticmethod
    def key(bucket: Bucket, number: int, rank: int) -> int:
        """By the first piece, as buckets may be cut in other ways on another number of ranks. Of a bucket of nothing,
        for which nothing is drawn, it is any."""
        if not bucket.pieces:
            return derive_key(number, rank)
        first = bucket.pieces[0]
        return derive_key(zlib.crc32(first.name.encode()), first.begin, number, rank)

    def memory(self) -> dict[str, Kept]:
        counts = dict(self._restored)
        for pieces, count in self._counts.items():
            if pieces:
                counts[pieces[0].name] = max(count, counts.get(pieces[0].name, 0))
        return {f"{self._use}/{name}": Kept(torch.tensor(count), "global") for name, count in counts.items()}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Go on with these counts. Older checkpoints have one for all buckets."""
        self._counts = {}
        own = {key: int(count) for key, count in memory.items() if key.partition("/")[0] == self._use}
        self._restored = {key.partition("/")[2]: count for key, count in own.items()}


def _first_name(bucket: Bucket) -> str:
    return bucket.pieces[0].name if bucket.pieces else ""
