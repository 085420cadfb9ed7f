"""The wire form of a stream: one tensor of bytes, and all that came from a network looked at before it is used.

    | form  | entries |  values ...  |  indices ...  |
      int32   int32     4 or 8 each     4 each          form: 0 sparse, 1 dense, which has no indices

Values come first, so that those of 8 bytes lie on a multiple of 8.
"""

import torch
from torch import Tensor

from weft.distributed.codecs.sparse_sums.stream import INDEX_TYPE, SparseStream
from weft.errors import EncodingError
from weft.planning.sparse_cost import HEADER_BYTES

__all__ = ["HEADER_BYTES", "body_bytes", "has_body", "read_stream", "write_stream"]

SPARSE, DENSE = 0, 1


def write_stream(stream: SparseStream) -> Tensor:
    """The bytes of a stream, as a uint8 tensor of their own."""
    form = DENSE if stream.indices is None else SPARSE
    header = torch.tensor([form, stream.num_entries], dtype=torch.int32, device=stream.values.device)
    tensors = [header, stream.values] if stream.indices is None else [header, stream.values, stream.indices]
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def body_bytes(header: Tensor, length: int, dtype: torch.dtype) -> int:
    """Bytes that follow this header (uint8) of a stream of that length and type.

    Raises:
        EncodingError: no such stream has this header.
    """
    form, count = header.view(torch.int32).tolist()
    is_known = (form == DENSE and count == length) or (form == SPARSE and 0 <= count <= length)
    if not is_known:
        raise _damaged(f"form: {form}, entries: {count}, length: {length}")
    return int(count) * (dtype.itemsize + (INDEX_TYPE.itemsize if form == SPARSE else 0))


def has_body(message: Tensor) -> bool:
    """Whether anything follows the header of a message."""
    return len(message) > HEADER_BYTES


def read_stream(message: Tensor, length: int, dtype: torch.dtype) -> SparseStream:
    """The stream of a message, on its memory.

    Args:
        message: as `write_stream` made it.
        length: that the vector must have.
        dtype: of its values.

    Raises:
        EncodingError: it is not the message of such a stream.
    """
    if message.dtype != torch.uint8 or message.dim() != 1 or len(message) < HEADER_BYTES:
        raise _damaged(f"shape: {tuple(message.shape)}, type: {message.dtype}")
    if message.storage_offset() % HEADER_BYTES:
        message = message.clone()
    num_bytes = body_bytes(message[:HEADER_BYTES], length, dtype)
    if len(message) != HEADER_BYTES + num_bytes:
        raise _damaged(f"bytes: {len(message)}, by its header: {HEADER_BYTES + num_bytes}")
    form, count = message[:HEADER_BYTES].view(torch.int32).tolist()
    end = HEADER_BYTES + count * dtype.itemsize
    values = message[HEADER_BYTES:end].view(dtype)
    if form == DENSE:
        return SparseStream(length, values)
    indices = message[end:].view(INDEX_TYPE)
    _check_indices(indices, length)
    return SparseStream(length, values, indices)


def _check_indices(indices: Tensor, length: int) -> None:
    if not len(indices):
        return
    if not (indices[1:] > indices[:-1]).all():
        raise _damaged(f"indices do not ascend, entries: {len(indices)}")
    first, last = int(indices[0]), int(indices[-1])
    if first < 0 or last >= length:
        raise _damaged(f"indices: {first} to {last}, length: {length}")


def _damaged(found: str) -> EncodingError:
    return EncodingError(f"message is no stream of this vector ({found}); give all ranks one plan")
