"""Random draws of compression, from their published definitions: a key for every message, and a hash of key and place.

key     SplitMix64 (Steele, Lea and Flood, 2014) over crc32(name), begin, number, rank
bits    lowbias32 of place ^ low word of the key, the high word put in before the second multiplication
draw    the upper 24 bits / 2^24
"""

import zlib

import numpy as np
from numpy.typing import NDArray

from weft.proving.compression.messages import Message

__all__ = ["bits_at", "derive", "key_of", "uniform_at"]

WORD, DOUBLE_WORD = 2**32, 2**64


def derive(*numbers: int) -> int:
    """A key of 64 bits.

    >>> hex(derive(0))                                                  # the first number of SplitMix64 from 0
    '0xe220a8397b1dcdaf'
    """
    state = 0
    for number in numbers:
        state = ((state ^ number % DOUBLE_WORD) + 0x9E3779B97F4A7C15) % DOUBLE_WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % DOUBLE_WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB % DOUBLE_WORD
        state ^= state >> 31
    return state


def key_of(message: Message, number: int, rank: int) -> int:
    """Of the message `number`, the first of which is 0, that a rank sends."""
    first = message.ranges[0]
    return derive(zlib.crc32(first.name.encode()), first.begin, number, rank)


def bits_at(key: int, num: int) -> NDArray[np.uint64]:
    """32 random bits for each of the places 0 to num - 1."""
    low, high = np.uint64(key % WORD), np.uint64(key // WORD)
    state = np.arange(num, dtype=np.uint64) ^ low
    state = (state ^ state >> np.uint64(16)) * np.uint64(0x7FEB352D) % np.uint64(WORD)
    state = (state ^ state >> np.uint64(15) ^ high) * np.uint64(0x846CA68B) % np.uint64(WORD)
    return state ^ state >> np.uint64(16)


def uniform_at(key: int, num: int) -> NDArray[np.float32]:
    """In [0, 1)."""
    return (bits_at(key, num) // np.uint64(2**8)).astype(np.float32) / np.float32(2**24)
