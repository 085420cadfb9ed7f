"""The codec seam: what is sent instead of a message, how it is added up, and what is kept back."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence

from torch import Tensor

from weft.distributed.codecs.packing import Bucket, Empty, PackedTensors
from weft.distributed.group.calls import Call, ReduceOp
from weft.errors import EncodingError
from weft.planning.codec_cost import CodecCost

__all__ = ["AbstractCodec", "Reduction", "decode_all", "decode_packed", "encode_all", "encode_packed", "malformed"]

Reduction = Generator[Call, None, Tensor]
"""A reduction under way: yields a call of the group, is resumed when that is done, and returns the decoded total.

Half precision yields one all-reduce, quantised messages one gathering; a codec whose messages depend on what others
sent (low rank: first one factor, then the other) yields more.
"""


class AbstractCodec(ABC):
    """Of one rank. Messages are of one packing, so that what is kept of a tensor is found again by its name.

        message  --encode-->  sent  ==transport==>  sent  --decode-->  message       to servers, neighbours
        message  --encode-->  sent  ====reduce===================>  decoded total     among all ranks of a group

    Rules, held by one contract suite over all codecs:
    - The message is left as it is by `encode`, and what was sent by `decode`. Both stay on the device of their tensors.
    - Every rank that decodes the same bits has the same bits, and so has every rank after a reduction.
    - `encode` of what was decoded, by a codec without memory, gives what was sent: rounding twice is rounding once.
    """

    @property
    @abstractmethod
    def is_exact(self) -> bool:
        """Whether messages are sent as they are, in place."""

    @property
    @abstractmethod
    def is_summable(self) -> bool:
        """Whether a group may add up what was encoded (all-reduce, reduce-scatter); else it is gathered, and decoded
        and added in the order of ranks."""

    @abstractmethod
    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor | None:
        """Memory for what is sent of a bucket, to be given to `encode`; None where none is needed."""

    @abstractmethod
    def encode(self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0) -> Tensor:
        """The tensor that is sent instead of a message.

        Args:
            message: of the bucket, flat or in the shape of its one piece.
            out: memory of `make_memory`, of which it may use a part; None to make some.
            share: the weight with which the message counts in a sum, and which it has been multiplied by; all weights
                add up to 1. What it was before must fit too: then so does the sum.

        Raises:
            EncodingError: a value does not fit. Names the tensor.
        """

    @abstractmethod
    def reduce(
        self, bucket: Bucket, sent: Tensor, size: int, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        """The sum or mean over the `size` ranks of a group, decoded; see `Reduction`.

        Args:
            sent: as `encode` returned it; may be overwritten.
            out: of the message's type and shape, to be written to.
        """

    @abstractmethod
    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        """The message that was sent, as near as it is known.

        Raises:
            EncodingError: it is not what `encode` makes of such a bucket.
        """

    @abstractmethod
    def memory(self) -> Mapping[str, Tensor]:
        """The parts that were not sent and wait for a later message, by the name of the tensor. A checkpoint holds them
        as a sum: for other ranks, only the sum over all matters."""

    @abstractmethod
    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Go on with this memory; what is not in it begins empty."""

    @abstractmethod
    def cost(self, bucket: Bucket) -> CodecCost:
        """Of one message."""


def malformed(bucket: Bucket, sent: Tensor) -> EncodingError:
    """The error of what is no message of a bucket."""
    about = f"tensors: {', '.join(bucket.names)}, shape: {tuple(sent.shape)}, type: {sent.dtype}"
    return EncodingError(f"message is not what was encoded ({about}); give all ranks one plan", bucket.names[0])


def encode_all(
    codec: AbstractCodec, buckets: Sequence[Bucket], messages: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The tensors that are sent for the messages of these buckets; None for one that is not there."""
    pairs = zip(buckets, messages, strict=True)
    return tuple(None if message is None else codec.encode(bucket, message) for bucket, message in pairs)


def decode_all(
    codec: AbstractCodec, buckets: Sequence[Bucket], sent: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The messages of these buckets, in the shapes of their pieces; None for one that was not sent."""
    decoded = [None if s is None else codec.decode(b, s) for b, s in zip(buckets, sent, strict=True)]
    return tuple(decoded)


def encode_packed(codec: AbstractCodec, tensors: PackedTensors) -> list[Tensor]:
    """The tensors that are sent for packed ones; their messages themselves without a codec."""
    return [codec.encode(bucket, message) for bucket, message in zip(tensors.buckets, tensors.messages, strict=True)]


def decode_packed(codec: AbstractCodec, like: PackedTensors, sent: Sequence[Tensor]) -> list[Tensor]:
    """The messages that were sent, of tensors like these.

    Raises:
        EncodingError: they are not what `encode_packed` makes of such tensors.
    """
    if len(sent) != len(like.buckets):
        raise EncodingError(f"message has other parts than tensors like these (parts: {len(sent)}); give all one plan")
    return [codec.decode(bucket, message) for bucket, message in zip(like.buckets, sent, strict=True)]
