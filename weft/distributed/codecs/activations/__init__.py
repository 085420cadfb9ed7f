"""Activations and their gradients on the wire: formats, and the group that carries them; see wire_format.py."""

from weft.distributed.codecs.activations.coded_group import CodedGroup
from weft.distributed.codecs.activations.wire_format import (
    AbstractWireFormat,
    EightBitFormat,
    ExactFormat,
    HalfFormat,
    empty_message,
    make_format,
    pack,
    unpack,
)

__all__ = [
    "AbstractWireFormat",
    "CodedGroup",
    "EightBitFormat",
    "ExactFormat",
    "HalfFormat",
    "empty_message",
    "make_format",
    "pack",
    "unpack",
]
