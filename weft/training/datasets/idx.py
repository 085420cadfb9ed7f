"""IDX files: the format of MNIST and its relatives."""

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import CorruptFileError

__all__ = ["read_idx"]

UNSIGNED_BYTE = 0x08  # the one element type that MNIST and its relatives use


def read_idx(path: Path, num_dims: int) -> Tensor:
    """The uint8 tensor in a file, compressed or not, that must have `num_dims` dimensions and not a byte too many.

    offset  0  1  2     3         4 ...                      4 + 4 num_dims ...
            0  0  type  num_dims  sizes, 4 bytes each, big   elements, 1 byte each
    """
    data = _read_bytes(path)
    header = 4 + 4 * num_dims
    magic = bytes((0, 0, UNSIGNED_BYTE, num_dims))
    if data[:4] != magic:
        raise _corrupt(path, f"magic {magic.hex()}", data[:4].hex() or "an empty file")
    if len(data) < header:
        raise _corrupt(path, f"a header of {header} bytes", f"{len(data)} bytes")
    shape = tuple(int.from_bytes(data[start : start + 4], "big") for start in range(4, header, 4))
    if len(data) != header + math.prod(shape):
        raise _corrupt(path, f"{header + math.prod(shape)} bytes for shape {shape}", f"{len(data)} bytes")
    return torch.frombuffer(bytearray(data[header:]), dtype=torch.uint8).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, "a whole gzip file", str(error)) from error


def _corrupt(path: Path, expected: str, found: str) -> CorruptFileError:
    return CorruptFileError(f"IDX file is damaged (file: {path}, expected: {expected}, found: {found}); fetch it again")
