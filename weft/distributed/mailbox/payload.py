"""What a message may hold: a small JSON header and dense tensors of the CPU, checked where it is sent."""

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
    "as_row",
    "check_fits",
    "check_tag",
    "decode_header",
    "decode_json",
    "encode_header",
    "encode_json",
    "fill",
    "is_tag",
    "prepare_tensors",
]

MAX_HEADER_BYTES = 2**16
MAX_TAG_BYTES = 64
RESERVED = "weft."

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
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
    """What strict JSON holds. Raises ValueError."""
    return _DECODER.decode(encoded.decode())


def is_tag(tag: str) -> bool:
    """Whether a message may have it: notes of who comes and goes cannot be forged by peers."""
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


def decode_header(encoded: bytes) -> dict[str, Any]:
    """The header that `encode_header` wrote. Raises ValueError for anything but a JSON object."""
    if encoded == b"{}":
        return {}
    header = decode_json(encoded)
    if not isinstance(header, dict):
        raise ValueError("header is not an object")
    return header


def prepare_tensors(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors in one piece each: themselves where they lie so, else copies."""
    return tuple(_dense(tensor) for tensor in tensors)


def _dense(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise UsageError(
            f"a message carries dense tensors of the CPU (device: {tensor.device}, layout: {tensor.layout}); "
            "move the tensor there"
        )
    if tensor.dtype not in DTYPES.values():
        raise UsageError(f"tensor is of a type that does not travel (type: {tensor.dtype}); convert it")
    return tensor.detach().contiguous()


def as_row(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that lies in one piece, without a copy."""
    row: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(row)


def check_fits(tensors: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Raise UsageError where a message's tensors are not those that were made ready for it."""
    sent = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    ready = [(tuple(tensor.shape), tensor.dtype) for tensor in into]
    if sent != ready:
        raise UsageError(
            f"message does not fit its receiver (sent: {_tell(sent)}, ready: {_tell(ready)}); "
            "make tensors of the same number, shapes and types ready"
        )


def fill(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Write a message's tensors into those that were made ready for it."""
    check_fits(tensors, into)
    for target, tensor in zip(into, tensors, strict=True):
        target.detach().copy_(tensor)
    return tuple(into)


def _tell(specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return "; ".join(f"{shape} {dtype}" for shape, dtype in specs) or "none"
