"""Frames: the units of a connection, once both sides have proved who they are.

    | head: magic, version, kind, sequence, bytes of meta, bytes of body, MAC | meta: JSON | body: raw tensors | [MAC] |

The MAC in the head covers head and meta under a key of this session and direction, and the sequence counts frames, so a
frame that is forged, replayed, dropped or reordered is found before anything is made of it. Bodies have a MAC of their
own where the connection leaves the machine. It covers their head too: one frame's body is not taken for another's.
Nothing is ever unpickled: types and shapes are checked against the size.
"""

import hashlib
import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from struct import Struct
from typing import Any

from torch import Tensor

from weft.distributed.mailbox.payload import DTYPES, MAX_HEADER_BYTES, MAX_TAG_BYTES, decode_json, encode_json, is_tag
from weft.errors import UsageError
from weft.specs import TensorSpec

__all__ = [
    "BODY_MAC_BYTES",
    "HEAD_BYTES",
    "MAC_BYTES",
    "MAX_META_BYTES",
    "VERSION",
    "Head",
    "Kind",
    "Meta",
    "RefusedError",
    "check_head",
    "digest_body",
    "pack_head",
    "pack_meta",
    "sign_body",
    "unpack_head",
    "unpack_meta",
]

MAGIC = b"weft"
VERSION = 3
MAC_BYTES = 16
BODY_MAC_BYTES = 32
MAX_TENSORS = 4096
MAX_META_BYTES = MAX_HEADER_BYTES + MAX_TAG_BYTES + MAX_TENSORS * 64
_FIELDS = Struct("<4sBBQIQ")
HEAD_BYTES = _FIELDS.size + MAC_BYTES
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RefusedError(Exception):
    """Something came over a connection that may not come; the text is the reason that is counted."""


class Kind(IntEnum):
    """The purpose of a frame."""

    WELCOME = 1  # the first of the side that was called
    MESSAGE = 2
    PING = 3
    GOODBYE = 4
    RELEASE = 5  # a block of shared memory has been read


@dataclass(frozen=True, slots=True)
class Head:
    kind: Kind
    meta_bytes: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Meta:
    """A message without its tensors. `block` is the number and the offset of the block of the sender's shared memory
    that they are in, if they are not in the body."""

    tag: str
    header: dict[str, Any]
    specs: tuple[TensorSpec, ...]
    block: tuple[int, int] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in self.specs)


def pack_head(key: bytes, kind: Kind, sequence: int, meta: bytes, body_bytes: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, kind, sequence, len(meta), body_bytes)
    return fields + _mac(key, fields, meta)


def unpack_head(raw: bytes, sequence: int, max_bytes: int) -> Head:
    """The head of the frame with this number, its sizes within the limits. Raises RefusedError."""
    magic, version, kind, its_sequence, meta_bytes, body_bytes = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise RefusedError("malformed")
    if version != VERSION:
        raise RefusedError("version")
    if meta_bytes > MAX_META_BYTES or body_bytes > max_bytes:
        raise RefusedError("oversized")
    if its_sequence != sequence:
        raise RefusedError("replayed" if its_sequence < sequence else "disordered")
    if kind not in Kind.__members__.values():
        raise RefusedError("malformed")
    return Head(Kind(kind), meta_bytes, body_bytes)


def check_head(key: bytes, raw: bytes, meta: bytes) -> None:
    """Raise RefusedError where head and meta were not written by whoever has the key."""
    if not hmac.compare_digest(_mac(key, raw[: _FIELDS.size], meta), raw[_FIELDS.size :]):
        raise RefusedError("forged")


def digest_body(views: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for view in views:
        digest.update(view)
    return digest.digest()


def sign_body(key: bytes, head: bytes, digest: bytes) -> bytes:
    """The MAC of the body with this digest under this head, whose sequence and MAC no other frame has.

    The digest is made apart because a frame has no sequence before its turn to be queued, and large bodies take long.
    """
    return hmac.digest(key, b"body" + head + digest, "sha256")


def pack_meta(tag: str, header: bytes, tensors: Sequence[Tensor], block: tuple[int, int] | None = None) -> bytes:
    specs = [[_NAMES[tensor.dtype], *tensor.shape] for tensor in tensors]
    if len(specs) > MAX_TENSORS:
        raise UsageError(f"too many tensors for one message ({len(specs)}, at most: {MAX_TENSORS}); join them")
    rest = encode_json([tag, specs, block or ()])
    return b"[" + rest + b"," + header + b"]"


def unpack_meta(raw: bytes) -> Meta:
    """The meta that `pack_meta` wrote. Raises RefusedError for anything else."""
    try:
        (tag, specs, block), header = decode_json(raw)
        meta = Meta(tag, header, tuple(TensorSpec(tuple(shape), DTYPES[name]) for name, *shape in specs))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RefusedError("malformed") from None
    is_sound = (
        type(tag) is str and is_tag(tag) and type(header) is dict and type(block) is list and len(block) in (0, 2)
    )
    if not is_sound or not all(map(_is_count, [*block, *(length for spec in meta.specs for length in spec.shape)])):
        raise RefusedError("malformed")
    return replace(meta, block=(block[0], block[1])) if block else meta


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**48


def _mac(key: bytes, fields: bytes, meta: bytes) -> bytes:
    return hmac.digest(key, fields + meta, "sha256")[:MAC_BYTES]
