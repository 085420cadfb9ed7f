"""Lossy compression from its definitions: dense code with the memory of every rank, which ranks are held to."""

from weft.proving.compression.compression import AbstractCompression, OfSenders
from weft.proving.compression.messages import Message, Range, messages_of_gradients, messages_of_weights
from weft.proving.compression.quantised import HalfSender
from weft.proving.compression.sender import Setting

__all__ = [
    "AbstractCompression",
    "HalfSender",
    "Message",
    "OfSenders",
    "Range",
    "Setting",
    "messages_of_gradients",
    "messages_of_weights",
]
