"""Tensors as 8-bit messages: one byte for a number, and for each block the largest magnitude in it.

    message    [ scale 0 | scale 1 | ... ][ code 0 | code 1 | ............ ]        bytes; a scale is a float32
                 4 bytes                    1 byte, of n numbers

A block's scale is the largest of its finite magnitudes. What is not finite has a code of its own, and comes back as
NaN; the others in its block are none the worse for it. Nothing is kept from one message to the next. A compiled form is
used where there is a compiler, and gives the same bits.
"""

import torch
from torch import Tensor

from weft.distributed.codecs.activations.native import load_library
from weft.distributed.codecs.activations.tables import NOT_FINITE, EightBitType

__all__ = ["BLOCK", "decode", "encode", "message_length"]

BLOCK = 2048
"""Numbers to a scale. Relative errors of what a small GPT sends from stage to stage, by numbers to a scale:

                256    2048   4096   all
    values      0.007  0.008  0.008  0.009     linear
    gradients   0.008  0.011  0.012  0.019
    values      0.011  0.012  0.013  0.014     tree
    gradients   0.012  0.015  0.016  0.020
    scales      1.6%   0.2%   0.1%   0%        of the bytes
"""

_SCALE_BYTES = 4


def message_length(num_elements: int) -> int:
    """Bytes of the message of so many numbers.

    >>> message_length(2048), message_length(2049)
    (2052, 2057)
    """
    return num_elements + _SCALE_BYTES * _num_blocks(num_elements)


@torch.no_grad()
def encode(tensor: Tensor, kind: EightBitType) -> Tensor:
    """The message of a tensor, in the order of its elements; float64 is rounded to float32 first.

    Args:
        tensor: of floats, on any device.
        kind: the type of codes.

    Returns:
        Bytes, [message_length(tensor.numel())].
    """
    numbers = tensor.detach().reshape(-1).float().contiguous()
    message = torch.empty(message_length(numbers.numel()), dtype=torch.uint8, device=tensor.device)
    scales, codes = _parts(message, numbers.numel())
    library = load_library() if numbers.is_cpu else None
    if library is None:
        _encode_by_torch(numbers, kind, scales, codes)
    else:
        search = (kind.first, kind.thresholds, kind.codes) if kind.name == "tree" else (None, None, None)
        places = [None if table is None else table.data_ptr() for table in search]
        library["weft_encode_eight_bit"](
            numbers.data_ptr(), numbers.numel(), BLOCK, *places, scales.data_ptr(), codes.data_ptr()
        )
    return message


@torch.no_grad()
def decode(message: Tensor, num_elements: int, kind: EightBitType) -> Tensor:
    """The numbers of a message, flat, in float32.

    Args:
        message: as `encode` made it.
        num_elements: of the tensor.
        kind: the type of codes.
    """
    assert message.numel() == message_length(num_elements), "a message is as long as its tensor says"
    scales, codes = _parts(message, num_elements)
    library = load_library() if message.is_cpu else None
    if library is None:
        return _decode_by_torch(scales, codes, kind)
    numbers = torch.empty(num_elements, dtype=torch.float32)
    library["weft_decode_eight_bit"](
        scales.data_ptr(), codes.data_ptr(), num_elements, BLOCK, kind.values.data_ptr(), numbers.data_ptr()
    )
    return numbers


def _encode_by_torch(numbers: Tensor, kind: EightBitType, scales: Tensor, codes: Tensor) -> None:
    is_finite = numbers.isfinite()
    finite = numbers if bool(is_finite.all()) else numbers.masked_fill(~is_finite, 0.0)
    blocks = _in_blocks(finite)
    largest = blocks.abs().amax(1)
    scales.copy_(largest.view(torch.uint8))
    divisors = largest.masked_fill(largest == 0, 1.0).unsqueeze(1)
    if kind.name == "linear":
        found = (blocks / divisors * 127.0).round_().to(torch.int8).view(torch.uint8)
    else:
        found = _nearest_in_tree(blocks / divisors, kind)
    codes.copy_(found.reshape(-1)[: codes.numel()])
    if finite is not numbers:
        codes[~is_finite] = NOT_FINITE


def _nearest_in_tree(normal: Tensor, kind: EightBitType) -> Tensor:
    first, thresholds, codes = (t.to(normal.device) for t in (kind.first, kind.thresholds, kind.codes))
    magnitudes = normal.abs().reshape(-1)
    places = first.index_select(0, magnitudes.view(torch.int32) >> 16)
    places += magnitudes > thresholds.index_select(0, places)
    is_negative = (normal.reshape(-1) < 0) & (places > 0)
    return codes.index_select(0, places) | (is_negative.to(torch.uint8) << 7)


def _decode_by_torch(scales: Tensor, codes: Tensor, kind: EightBitType) -> Tensor:
    values = kind.values.to(codes.device).index_select(0, codes.int())
    by_block = scales.clone().view(torch.float32).unsqueeze(1)  # a message may begin at any byte
    return (_in_blocks(values) * by_block).reshape(-1)[: codes.numel()]


def _in_blocks(numbers: Tensor) -> Tensor:
    """[blocks, BLOCK], zeros at the end."""
    missing = -numbers.numel() % BLOCK
    return torch.nn.functional.pad(numbers, (0, missing)).view(-1, BLOCK)


def _parts(message: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    begin = _SCALE_BYTES * _num_blocks(num_elements)
    return message[:begin], message[begin:]


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // BLOCK)
