"""The codec seam: what is sent instead of a message, how it is added up, and what is kept back."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.distributed.codecs.packing import Bucket, Empty, PackedTensors
from weft.distributed.group.calls import Call, ReduceOp
from weft.distributed.group.group import AbstractGroup
from weft.errors import EncodingError
from weft.planning.codec_cost import CodecCost
from weft.training.checkpoint import Kind

__all__ = [
    "AbstractCodec",
    "Kept",
    "Reduction",
    "decode_all",
    "decode_packed",
    "encode_all",
    "encode_packed",
    "forget_unsent",
    "malformed",
]

Reduction = Generator[Call | tuple[Call, ...], None, Tensor]
"""A reduction under way: yields a call of the group, or several that go together, is resumed when they are done, and
returns the decoded total.

Half precision yields one all-reduce, quantised messages one gathering; a codec whose messages depend on what others
sent (low rank: first one factor, then the other) yields more.
"""


@dataclass(frozen=True)
class Kept:
    """A tensor that a codec keeps from one message to the next, as a checkpoint holds it.

    Args:
        kind: `sum` for what waits to be sent: for other ranks, only the sum over all matters. `global` for what all
            ranks have alike.
    """

    tensor: Tensor
    kind: Kind = "sum"


class AbstractCodec(ABC):
    """Of one rank. Messages are of one packing, so that what is kept of a tensor is found again by its name.

        message  --encode-->  sent  ==transport==>  sent  --decode-->  message       to servers, neighbours
        message  --encode-->  sent  ====reduce===================>  decoded total     among all ranks of a group

    Rules, held by one contract suite over all codecs:
    - The message is left as it is by `encode`, and what was sent by `decode`. Both stay on the device of their tensors.
    - Every rank that decodes the same bits has the same bits, and so has every rank after a reduction.
    - `encode` of what was decoded, by a codec that rounds, gives what was sent: rounding twice is rounding once.
    - A number that is not finite shows in the total of its step, and in that of no later one.
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

    def meet(self, bucket: Bucket, group: AbstractGroup) -> None:  # noqa: B027 -- few have anything to decide
        """Before the first message of a bucket, of all ranks of the group that will add it up. A collective call."""

    def sends_as_it_is(self, bucket: Bucket) -> bool:
        """Whether messages of this bucket are sent as they are, in place."""
        return self.is_exact

    @property
    def is_dense(self) -> bool:
        """Whether every element is sent, in its place: then a part of what was encoded is a message of its own."""
        return self.is_exact

    @property
    def is_even(self) -> bool:
        """Whether the messages of all ranks, of one bucket in one step, have the same length."""
        return True

    @property
    def carries_weights(self) -> bool:
        """Whether a message stands for itself: every number of it is rounded, relative to its own size. Only then may
        weights be sent through the codec; what others send must be added up over time."""
        return self.is_exact

    @property
    def mixing_step(self) -> float:
        """How far ranks move towards each other's estimates, which are made of messages of this codec, of the way to
        their weights (gamma of CHOCO-SGD): 1 where one message says nearly all."""
        return 1.0

    @property
    def takes_momentum(self) -> bool:
        """Whether ranks keep the momentum of their gradients before they send them, so that the update has none."""
        return False

    def set_momentum(self, momentum: float, *, nesterov: bool) -> None:
        """The momentum of the optimizer, of a codec that takes it."""
        raise AssertionError("this codec leaves the momentum to the optimizer")

    @abstractmethod
    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor | None:
        """Memory for what is sent of a bucket, to be given to `encode`; None where none is needed."""

    @abstractmethod
    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        """The tensor that is sent instead of `scale` times a message.

        Args:
            message: of the bucket, flat or in the shape of its one piece.
            out: memory of `make_memory`, of which it may use a part; None to make some.
            share: the weight with which the message counts in a sum, and which it has been multiplied by, beside
                `scale`; all weights add up to 1. What it was before must fit too: then so does the sum.
            scale: multiplied in on the way, which saves whoever weights a message a pass over it.

        Raises:
            EncodingError: a value does not fit. Names the tensor.
        """

    @abstractmethod
    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        """The sum or mean over the ranks of a group, decoded; see `Reduction`. Whoever runs it starts the calls.

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

    def is_waiting(self, name: str) -> bool:
        """Whether a part of this tensor was not sent, and waits for a later message."""
        return False

    @abstractmethod
    def memory(self) -> Mapping[str, Kept]:
        """The tensors that it keeps, by use and name: `residual/w` is the part of w that was not sent and waits for a
        later message. Of a tensor that travels in pieces it is flat."""

    @abstractmethod
    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Go on with this memory, by the same names; what is not in it begins empty."""

    @abstractmethod
    def cost(self, bucket: Bucket) -> CodecCost:
        """Of one message."""


def malformed(bucket: Bucket, sent: Tensor) -> EncodingError:
    """The error of what is no message of a bucket."""
    about = f"tensors: {', '.join(bucket.names)}, shape: {tuple(sent.shape)}, type: {sent.dtype}"
    name = bucket.names[0] if bucket.names else ""
    return EncodingError(f"message is not what was encoded ({about}); give all ranks one plan", name)


def forget_unsent(codec: AbstractCodec) -> None:
    """Let go of what waits to be sent, for one who gives the codec all that was not sent again."""
    codec.remember({name: kept.tensor for name, kept in codec.memory().items() if kept.kind != "sum"})


def encode_all(
    codec: AbstractCodec, buckets: Sequence[Bucket], messages: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The tensors that are sent for the messages of these buckets; None for one that is not there."""
    pairs = zip(buckets, messages, strict=True)
    return tuple(None if message is None else codec.encode(bucket, message) for bucket, message in pairs)


def decode_all(
    codec: AbstractCodec, buckets: Sequence[Bucket], sent: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The messages of these buckets, each of one piece, in its shape; None for one that was not sent."""
    pairs = zip(buckets, sent, strict=True)
    return tuple(None if message is None else codec.decode(b, message).view(b.shapes[0]) for b, message in pairs)


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
