"""Codecs: messages that are sent instead of tensors, and what is kept back; one packing of named tensors."""

from weft.distributed.codecs.choice import make_codec
from weft.distributed.codecs.codec import (
    AbstractCodec,
    Kept,
    Reduction,
    decode_all,
    decode_packed,
    encode_all,
    encode_packed,
    forget_unsent,
)
from weft.distributed.codecs.entries import entries_of, remember_entries
from weft.distributed.codecs.exact import ExactCodec
from weft.distributed.codecs.half import HalfCodec
from weft.distributed.codecs.packing import (
    Bucket,
    Empty,
    PackedTensors,
    Piece,
    bucket_by_type,
    bucket_of,
    bucket_pieces,
    write,
)
from weft.distributed.codecs.reduction import ReductionWork, add_encoded, scatter_encoded

__all__ = [
    "AbstractCodec",
    "Bucket",
    "Empty",
    "ExactCodec",
    "HalfCodec",
    "Kept",
    "PackedTensors",
    "Piece",
    "Reduction",
    "ReductionWork",
    "add_encoded",
    "bucket_by_type",
    "bucket_of",
    "bucket_pieces",
    "decode_all",
    "decode_packed",
    "encode_all",
    "encode_packed",
    "entries_of",
    "forget_unsent",
    "make_codec",
    "remember_entries",
    "scatter_encoded",
    "write",
]
