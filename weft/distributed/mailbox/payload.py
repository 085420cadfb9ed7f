"""The contents of a message: a small JSON header and dense tensors, checked where it is sent.

Tensors of other devices travel by way of host memory, and arrive there, or in tensors of the receiver's choice.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError

__all__ = [
    "DTYPES",
    "MAX_HEADER_BYTES",
    "MAX_TAG_BYTES",
    "check_tag",
    "decode_json",
    "encode_header",
    "encode_json",
    "fill",
    "is_tag",
    "prepare_tensors",
    "view_bytes",
]

MAX_HEADER_BYTES = 2**16
MAX_TAG_BYTES = 64
RESERVED = "weft."

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ["float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool"]
}
"""The types that travel, by the name they travel under."""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# Made once: json.dumps and json.loads make a new one for every call that is not plain.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def encode_json(value: Any) -> bytes:
    """Strict JSON in UTF-8. Raises TypeError and ValueError."""
    return _ENCODER.encode(value).encode()


def decode_json(encoded: bytes) -> Any:
    """The value of strict JSON. Raises ValueError."""
    return _DECODER.decode(encoded.decode())


def is_tag(tag: str) -> bool:
    """Whether a message may have it: peers cannot forge the notifications of who joins and leaves."""
    return 0 < len(tag.encode(errors="replace")) <= MAX_TAG_BYTES and not tag.startswith(RESERVED)


def check_tag(tag: str) -> None:
    """Raise UsageError where a tag cannot be sent."""
    if not is_tag(tag):
        raise UsageError(
            f"tag cannot be sent (tag: {tag!r}); use 1 to {MAX_TAG_BYTES} bytes that do not begin with {RESERVED}"
        )


def encode_header(header: Mapping[str, Any] | None) -> bytes:
    """The header as strict JSON in UTF-8.

    >>> encode_header({"step": 3})
    b'{"step":3}'
    """
    if not header:
        return b"{}"
    try:
        encoded = encode_json(dict(header))
    except (TypeError, ValueError) as error:
        raise UsageError(f"header is not JSON ({error}); use text, whole and finite numbers, lists") from None
    if len(encoded) > MAX_HEADER_BYTES:
        raise UsageError(
            f"header is too large (bytes: {len(encoded)}, at most: {MAX_HEADER_BYTES}); send a tensor instead"
        )
    return encoded


def prepare_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, contiguous and in host memory: themselves where they are, else copies. Raises UsageError for what
    cannot be sent."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_meta:
            raise UsageError(
                f"a message carries dense tensors that have values (device: {tensor.device}, layout: {tensor.layout}); "
                "convert it"
            )
        if tensor.dtype not in DTYPES.values():
            raise UsageError(f"tensor is of a type that does not travel (type: {tensor.dtype}); convert it")
    return tuple(tensor.detach().cpu().contiguous() for tensor in tensors)


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def fill(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Write a message's tensors into those given for it. Raises UsageError where shapes or types differ."""
    sent = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    expected = [(tuple(tensor.shape), tensor.dtype) for tensor in into]
    if sent != expected:
        raise UsageError(
            f"message does not fit its receiver (sent: {_tell(sent)}, expected: {_tell(expected)}); "
            "receive into tensors of the same number, shapes and types"
        )
    for target, tensor in zip(into, tensors, strict=True):
        target.detach().copy_(tensor)
    return tuple(into)


def _tell(specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return "; ".join(f"{shape} {dtype}" for shape, dtype in specs) or "none"
