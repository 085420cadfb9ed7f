"""Codecs: messages that are sent instead of tensors, and what is kept back; one packing of named tensors."""

from weft.distributed.codecs.choice import make_codec
from weft.distributed.codecs.codec import AbstractCodec, Reduction, decode_all, decode_packed, encode_all, encode_packed
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
from weft.distributed.codecs.reduction import ReductionWork, add_encoded, gather_encoded

__all__ = [
    "AbstractCodec",
    "Bucket",
    "Empty",
    "ExactCodec",
    "HalfCodec",
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
    "gather_encoded",
    "make_codec",
    "write",
]
