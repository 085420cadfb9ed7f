"""A worker's side of one shard: which pieces it holds, what is under way to it, what comes back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from weft.distributed.codecs import AbstractCodec, ExactCodec, Piece, bucket_pieces, encode_all
from weft.distributed.consistency.server.protocol import PushHeader, Tag
from weft.distributed.group.group import AbstractWork
from weft.distributed.mailbox import AbstractMailbox, AbstractReceive, Message
from weft.errors import DeadlineError, PeerLostError

__all__ = ["ShardLink"]

PATIENCE_SECONDS = 60.0
"""How long a worker waits for a server that was lost to be restored."""


@final
class ShardLink:
    """Weights that arrive are written into the parameters, which are the model's own memory. Pieces travel encoded,
    each a message of its own, except where a shard's weights are asked for as they are (`pull`).

    Args:
        codec: of pushes, which keeps what it does not send.
        weights_codec: of the weights that come back.

    There is one question at a time, and its answer is asked of the mailbox before it sets out: where a server dies and
    another is in its place before anybody looks, which knows nothing of the question, the mailbox says so.
    """

    def __init__(
        self,
        mailbox: AbstractMailbox,
        address: int,
        pieces: Sequence[Piece],
        parameters: Mapping[str, Tensor],
        codec: AbstractCodec | None = None,
        weights_codec: AbstractCodec | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._codec = codec or ExactCodec()
        self._weights_codec = weights_codec or ExactCodec()
        self.address = address
        self.pieces = tuple(pieces)
        self.places = [piece.of(parameters[piece.name]) for piece in pieces]
        self.buckets = bucket_pieces(pieces, parameters)
        self.about: dict[str, object] = {}  # what else a push says of itself
        self.version = 0
        self.step = 0  # what the shard told this rank to take
        self.is_stopped = False
        self.loss: float | None = None  # of the last step, where ranks are synchronous
        self._under_way: list[AbstractWork] = []
        self._answer: AbstractReceive | None = None
        self._is_encoded = False  # the weights in it
        self._has_been_lost = False
        self._missing: set[str] = set()
        self._has_part = False

    # A step.

    def begin(self) -> None:
        self._missing = {piece.name for piece in self.pieces}
        self._has_part = False

    def is_completed_by(self, name: str) -> bool:
        """Note that a gradient is there; whether it was the last of this shard."""
        if name not in self._missing:
            return False
        self._missing.discard(name)
        return not self._missing

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def cut(self, tensors: Mapping[str, Tensor | None]) -> list[Tensor | None]:
        """This shard's pieces of tensors by parameter name."""
        found = [(piece, tensors.get(piece.name)) for piece in self.pieces]
        return [None if tensor is None else piece.of(tensor) for piece, tensor in found]

    def encode(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The tensors that are sent for this shard's pieces."""
        return encode_all(self._codec, self.buckets, tensors)

    def decode(self, sent: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        """Write what was sent of this shard's pieces of weights; of one that was not, nothing."""
        for bucket, tensor, place in zip(self.buckets, sent, out, strict=True):
            if tensor is not None and place is not None:
                self._weights_codec.decode(bucket, tensor, place)

    def send_part(self, run: int, step: int, tensors: Sequence[Tensor | None]) -> int:
        self._has_part = True
        return self.tell(Tag.PART, {"run": run, "step": step}, [t for t in self.encode(tensors) if t is not None])

    def push(self, header: PushHeader, tensors: Sequence[Tensor | None]) -> int:
        """Send a gradient, or what is still to be said of one that is there already; how many bytes were sent."""
        return self.push_encoded(header, tensors if self._has_part else self.encode(tensors))

    def push_encoded(self, header: PushHeader, sent: Sequence[Tensor | None]) -> int:
        """As `push`, of pieces that are encoded."""
        absent = tuple(index for index, tensor in enumerate(sent) if tensor is None)
        header = replace(header, version=self.version, absent=absent, in_part=self._has_part)
        given = () if self._has_part else [tensor for tensor in sent if tensor is not None]
        about = {**vars(header), **self.about}
        return self._ask_for_weights(Tag.PUSH, Tag.WEIGHTS, about, given, wants=header.wants)

    # Questions and answers.

    def greet(self, run: int, step: int | None) -> None:
        """Ask for weights.

        Args:
            step: the earliest that this rank may take; None if it knows nothing yet.
        """
        self._ask_for_weights(Tag.HELLO, Tag.WELCOME, {"run": run, "step": step, "version": self.version})

    def pull(self, run: int, into: Sequence[Tensor]) -> None:
        """Ask for the shard's weights as they are."""
        self.ask(Tag.PULL, Tag.WEIGHTS, {"run": run}, into=into)

    def _ask_for_weights(
        self,
        tag: Tag,
        expected: Tag,
        header: Mapping[str, object],
        tensors: Sequence[Tensor] = (),
        *,
        wants: bool = True,
    ) -> int:
        """In place, where they come as they are and nothing else comes with them."""
        into = self.places if self._weights_codec.is_exact and expected == Tag.WEIGHTS else None
        num_bytes = self.ask(tag, expected, header, tensors, into=into if wants else ())
        self._is_encoded = wants and into is None
        return num_bytes

    def await_return(self, *, is_restored: bool = True) -> None:
        """Wait until a server that was lost is there again, where one may come in its place."""
        self._under_way, self._has_been_lost = [], True
        seconds = PATIENCE_SECONDS if is_restored else 0.0
        try:
            self._mailbox.await_peers([self.address], self._mailbox.clock.now() + seconds)
        except DeadlineError:
            about = f"peer: {self.address}, waited: {seconds:g} s"
            text = f"server is lost, and none came in its place ({about}); start again"
            raise PeerLostError(text, self.address) from None

    def ask(
        self,
        tag: Tag,
        expected: Tag,
        header: Mapping[str, object],
        tensors: Sequence[Tensor] = (),
        *,
        into: Sequence[Tensor] | None = None,
    ) -> int:
        """Send what is answered under `expected`; how many bytes."""
        if self._answer is not None:
            self._answer.cancel()
        self._is_encoded = False
        # A server that was taken for lost may have heard the question, and answers the same one twice.
        while self._has_been_lost and self._mailbox.poll(expected, self.address) is not None:
            pass
        self._answer = self._mailbox.start_receive(expected, self.address, into=into)
        return self.tell(tag, header, tensors)

    def tell(self, tag: Tag, header: Mapping[str, object], tensors: Sequence[Tensor] = ()) -> int:
        """Send what needs no answer; how many bytes."""
        self._under_way.append(self._mailbox.start_send(self.address, tag, header, tensors))
        return sum(tensor.nbytes for tensor in tensors)

    def await_answer(self) -> Message:
        """Of the question that was asked last; weights that answer it are where they belong."""
        answer, self._answer = self._answer, None
        assert answer is not None, "a question comes first"
        under_way, self._under_way = self._under_way, []
        try:
            for work in under_way:
                work.wait()
            message = answer.wait()
        finally:
            answer.cancel()
        self._note(message)
        return message

    def _note(self, message: Message) -> None:
        header = message.header
        if self._is_encoded:
            self.decode(message.tensors[: len(self.places)], self.places)
        if "version" in header:
            self.version = int(header["version"])
        if "step" in header:
            self.step, self.is_stopped = int(header["step"]), bool(header["stop"])
        if "loss" in header:
            self.loss = float.fromhex(header["loss"])
