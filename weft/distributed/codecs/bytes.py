"""Codecs whose messages are bytes.

encode    flat message of float32 or float64  --write-->  bytes
decode    bytes  --read-->  flat tensor

Types of 16 bits are encoded from 32; whole numbers travel as they are.
"""

from abc import abstractmethod
from typing import final

import torch
from torch import Tensor

from weft.distributed.codecs.codec import AbstractCodec, malformed
from weft.distributed.codecs.packing import Bucket, Empty
from weft.distributed.codecs.residuals import working_type

__all__ = ["AbstractByteCodec", "finished"]


class AbstractByteCodec(AbstractCodec):
    """Leaves to a codec how a flat tensor of float32 or float64 is written to bytes, and how these are read."""

    @abstractmethod
    def num_sent(self, bucket: Bucket) -> int | None:
        """Bytes of a message of floating-point numbers, padded (layout.py); None where they are not always as many."""

    @abstractmethod
    def write(self, bucket: Bucket, message: Tensor, scale: float, out: Tensor) -> Tensor:
        """The bytes of `scale` times a flat message of the working type: `out`, or others where their number hangs on
        the message."""

    @abstractmethod
    def read(self, bucket: Bucket, sent: Tensor, into: Tensor, *, add: bool) -> None:
        """Write what was sent into a flat tensor of the working type, or add it.

        Raises:
            EncodingError: the bytes are not what `write` makes of such a bucket.
        """

    @final
    @property
    def is_exact(self) -> bool:
        return False

    @final
    @property
    def is_summable(self) -> bool:
        return False

    @final
    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor | None:
        length = self._length(bucket)
        return None if length is None else empty((length,), torch.uint8).zero_()  # padding is sent too

    @final
    @torch.no_grad()
    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        """Into `out` where it is given; else into memory of its own."""
        flat = message.detach().reshape(-1)
        if not bucket.dtype.is_floating_point:
            assert scale == 1.0, "whole numbers have no weights"
            return flat.view(torch.uint8).clone() if out is None else out.copy_(flat.view(torch.uint8))
        sent = flat.new_zeros(self.num_sent(bucket) or 0, dtype=torch.uint8) if out is None else out
        if not bucket.num_elements:
            return sent[:0]
        return self.write(bucket, flat.to(working_type(bucket.dtype)), scale, sent)

    @final
    @torch.no_grad()
    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        self.check_length(bucket, sent)
        if not bucket.dtype.is_floating_point:
            numbers = sent.view(bucket.dtype)
            return numbers.clone() if out is None else out.copy_(numbers.view(out.shape))
        place = self.place_for(bucket, sent, out)
        if bucket.num_elements:
            self.read(bucket, sent, place, add=False)
        return finished(bucket, place, out)

    @final
    def check_length(self, bucket: Bucket, sent: Tensor) -> None:
        length = self._length(bucket)
        if sent.dtype != torch.uint8 or sent.ndim != 1 or (length is not None and sent.numel() != length):
            raise malformed(bucket, sent)

    def _length(self, bucket: Bucket) -> int | None:
        if not bucket.num_elements:  # the part of a rank that owns nothing of a bucket
            return 0
        return self.num_sent(bucket) if bucket.dtype.is_floating_point else bucket.num_bytes

    def place_for(self, bucket: Bucket, sent: Tensor, out: Tensor | None) -> Tensor:
        """Where numbers are decoded to: the memory that was given, if it is of the working type."""
        dtype = working_type(bucket.dtype)
        if out is not None and out.dtype == dtype and out.is_contiguous():
            return out.view(-1)
        return torch.empty(bucket.num_elements, dtype=dtype, device=sent.device)


def finished(bucket: Bucket, place: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return place.to(bucket.dtype)
    return out if out.data_ptr() == place.data_ptr() else out.copy_(place.view(out.shape))
