"""The kernels in torch, for any device: the meaning of each, bit for bit.

Nothing is left to a library's choice. Products and sums are rounded one by one (`add_(alpha=)` would fuse them),
quotients are those of tensors (a number over a tensor goes through the reciprocal), and sums have a fixed order: lane j
of a block adds up elements j, j + 8, ..., then the lanes are halved.

    block    0  1  2  3  4  5  6  7        lanes   0 1 2 3 4 5 6 7
             8  9 10 11 12 13 14 15                0 1 2 3          + 4 5 6 7
            16 17 18                               0 1              + 2 3
                                                   0                + 1

Magnitudes are compared as whole numbers, by the bits of |x|: finite < infinite < not a number, and all of the last are
alike.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.distributed.codecs.kernels.random import mix, uniform

LANES = 8
NUM_SAMPLES = 2**14
"""Elements from which a threshold is estimated."""

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}


def add(kept: Tensor, message: Tensor, scale: float) -> None:
    """kept += scale * message, rounded twice."""
    kept.copy_(kept + _number(scale, kept) * message)


def add_momentum(
    velocity: Tensor, kept: Tensor, message: Tensor, scale: float, momentum: float, nesterov: bool
) -> None:
    """DGC's equations 4 and 5; the arguments are those of the package's function."""
    fresh_velocity, fresh = _with_momentum(velocity, kept, message, scale, momentum, nesterov)
    velocity.copy_(fresh_velocity)
    kept.copy_(fresh)


def add_and_select(
    kept: Tensor,
    message: Tensor | None,
    scale: float,
    num: int,
    *,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    """The places of the `num` largest, ascending; the arguments are those of the package's function."""
    _update(kept, message, scale, velocity, momentum, nesterov)
    words = magnitudes(kept)
    if num == 0:
        return torch.zeros(0, dtype=torch.int32, device=kept.device)
    bound = words.topk(num, sorted=False).values.min()
    above, ties = (words > bound).nonzero().flatten(), (words == bound).nonzero().flatten()
    chosen = torch.cat((above, ties[: num - above.numel()]))
    return chosen.sort().values.to(torch.int32)


def add_and_select_above(
    kept: Tensor,
    message: Tensor | None,
    scale: float,
    threshold: float,
    *,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    """The places of all that reach the threshold; the arguments are those of the package's function."""
    _update(kept, message, scale, velocity, momentum, nesterov)
    return (magnitudes(kept) >= magnitudes(_number(threshold, kept))).nonzero().flatten().to(torch.int32)


def estimate_threshold(
    kept: Tensor,
    message: Tensor | None,
    scale: float,
    num: int,
    key: int,
    *,
    velocity: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> float:
    """The magnitude of the right rank in a sample; the arguments are those of the package's function."""
    places = sample_places(kept.numel(), key, kept.device)
    sample = kept[places]
    _update(
        sample,
        None if message is None else message[places],
        scale,
        None if velocity is None else velocity[places],
        momentum,
        nesterov,
    )
    rank = min(max(round(num * places.numel() / kept.numel()), 1), places.numel())
    word = magnitudes(sample).topk(rank, sorted=False).values.min()
    value = float(word.view(kept.dtype))
    return max(value, torch.finfo(kept.dtype).tiny) if value == value else float("inf")


def sample_places(num: int, key: int, device: torch.device) -> Tensor:
    """All places, or NUM_SAMPLES of them: one, chosen by the key, from each of as many equal parts."""
    if num <= NUM_SAMPLES:
        return torch.arange(num, device=device)
    parts = torch.arange(NUM_SAMPLES, device=device)
    return (parts * num + ((mix(parts, key) * num) >> 32)) // NUM_SAMPLES


def take(kept: Tensor, indices: Tensor, velocity: Tensor | None = None) -> Tensor:
    """kept[indices], and zeros in their place."""
    places = indices.long()
    values = kept[places]
    kept[places] = 0
    if velocity is not None:
        velocity[places] = 0
    return values


def are_within(indices: Tensor, num: int) -> bool:
    """Whether all are at least 0 and below `num`."""
    if indices.numel() == 0:
        return True
    low, high = torch.aminmax(indices)
    return int(low) >= 0 and int(high) < num


def are_ascending(indices: Tensor) -> bool:
    """Whether each is larger than the one before it, and the first at least 0."""
    return indices.numel() == 0 or (int(indices[0]) >= 0 and bool((indices[1:] > indices[:-1]).all()))


def scatter_add(dense: Tensor, indices: Tensor, values: Tensor) -> None:
    """dense[i] += v, one after the other (`index_add_` on a CPU is a loop)."""
    dense.index_add_(0, indices, values)


def merge(indices_a: Tensor, values_a: Tensor, indices_b: Tensor, values_b: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two streams; the arguments are those of the package's function."""
    indices, order = torch.cat((indices_a, indices_b)).sort(stable=True)
    values = torch.cat((values_a, values_b))[order]
    is_twin = indices[1:] == indices[:-1]  # that of b, behind that of a
    first = is_twin.nonzero().flatten()
    values[first] = values[first] + values[first + 1]
    is_kept = torch.ones_like(indices, dtype=torch.bool)
    is_kept[1:] = ~is_twin
    return indices[is_kept], values[is_kept]


def block_norms(x: Tensor, block: int, kind: Literal["l2", "max"]) -> Tensor:
    """The norm of each block."""
    if kind == "l2":
        wide = x.double()
        return _block_sums(wide * wide, block).sqrt().float()
    return _rows(x.abs(), block).amax(1).float()


def quantise(x: Tensor, norms: Tensor, block: int, bits: int, key: int) -> Tensor:
    """Packed codes, rounded at random; the arguments are those of the package's function."""
    top = 2 ** (bits - 1) - 1
    factors = torch.full_like(norms, top) / norms
    is_usable = norms.isfinite() & factors.isfinite()
    small = x.float()
    ratios = small.abs() * _spread(factors, block, x.numel())
    ratios = torch.where(ratios < top, ratios, float(top))
    levels = (ratios + uniform(key, x.numel(), x.device)).int().clamp(max=top)
    codes = levels | (small.signbit().int() << (bits - 1))
    return pack_bits(torch.where(_spread(is_usable, block, x.numel()), codes, 0), bits)


def dequantise(codes: Tensor, norms: Tensor, block: int, bits: int, out: Tensor, add: bool = False) -> None:
    """Numbers from packed codes; the arguments are those of the package's function."""
    top = 2 ** (bits - 1) - 1
    units = norms / torch.full_like(norms, top)
    unpacked = unpack_bits(codes, bits, out.numel())
    values = (unpacked & top).float() * _spread(units, block, out.numel())
    values = torch.where(unpacked > top, -values, values).to(out.dtype)
    out.copy_(out + values if add else values)


def encode_signs(kept: Tensor, block: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """One bit each, and the means of both sides of every block; kept becomes what that leaves."""
    is_high, zero = kept >= 0, torch.zeros((), dtype=torch.float64, device=kept.device)
    wide = kept.double()
    if symmetric:
        mean = _mean(_block_sums(wide.abs(), block), _block_sums(torch.ones_like(wide), block))
        scales = torch.stack((mean, -mean))
    else:
        high = _mean(_block_sums(torch.where(is_high, wide, zero), block), _block_sums(is_high.double(), block))
        low = _mean(_block_sums(torch.where(is_high, zero, wide), block), _block_sums((~is_high).double(), block))
        scales = torch.stack((high, low))
    kept.copy_(kept - _of_signs(is_high, scales, block).to(kept.dtype))
    return pack_bits(is_high.int(), 1), scales


def decode_signs(codes: Tensor, scales: Tensor, block: int, out: Tensor, add: bool = False) -> None:
    """The scale of each bit's side; the arguments are those of the package's function."""
    values = _of_signs(unpack_bits(codes, 1, out.numel()) > 0, scales, block).to(out.dtype)
    out.copy_(out + values if add else values)


def orthogonalise(matrix: Tensor) -> None:
    columns = matrix.double().unbind(1)
    for index, column in enumerate(columns):
        for before in columns[:index] * 2:
            column.sub_(_add_in_turn(before * column) * before)
        norm = _add_in_turn(column.square()).sqrt()
        column.div_(torch.where(norm > 0, norm, 1.0))
    matrix.copy_(torch.stack(columns, 1))


def _add_in_turn(numbers: Tensor) -> Tensor:
    """One number after the other, which a sum in parallel does not."""
    return numbers.cumsum(0)[-1] if len(numbers) else numbers.sum()


def multiply_factors(left: Tensor, right: Tensor, out: Tensor) -> None:
    product = out.view(left.shape[0], right.shape[0])
    torch.mul(left[:, :1], right[:, 0], out=product)
    for column in range(1, left.shape[1]):
        product.add_(left[:, column : column + 1] * right[:, column])


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers below 2^bits as bytes, the first of a byte in its low bits."""
    per_byte = 8 // bits
    rows = pad(codes, (0, -codes.numel() % per_byte)).view(-1, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (rows.int() << shifts).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, num: int) -> Tensor:
    """The first `num` numbers of packed bytes, int32."""
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=packed.device)
    codes: Tensor = (packed.int().unsqueeze(1) >> shifts) & (2**bits - 1)
    return codes.flatten()[:num]


def magnitudes(x: Tensor) -> Tensor:
    """The bits of |x| as whole numbers, one number for everything that is none."""
    word, info = WORDS[x.dtype], torch.iinfo(WORDS[x.dtype])
    least_nan = int(torch.tensor(float("inf"), dtype=x.dtype).view(word)) + 1
    words: Tensor = x.view(word) & info.max
    return words.clamp(max=least_nan)


def _update(
    kept: Tensor, message: Tensor | None, scale: float, velocity: Tensor | None, momentum: float, nesterov: bool
) -> None:
    if message is None:
        return
    if velocity is None:
        add(kept, message, scale)
    else:
        add_momentum(velocity, kept, message, scale, momentum, nesterov)


def _with_momentum(
    velocity: Tensor, kept: Tensor, message: Tensor, scale: float, momentum: float, nesterov: bool
) -> tuple[Tensor, Tensor]:
    gradient, factor = _number(scale, kept) * message, _number(momentum, kept)
    if nesterov:
        fresh = factor * (velocity + gradient)
        return fresh, kept + (fresh + gradient)
    fresh = factor * velocity + gradient
    return fresh, kept + fresh


def _number(value: float, like: Tensor) -> Tensor:
    return torch.tensor(value, dtype=like.dtype, device=like.device)


def _rows(x: Tensor, block: int) -> Tensor:
    """A row for each block, zeros behind the last."""
    block = min(block, max(x.numel(), 1))
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def _block_sums(wide: Tensor, block: int) -> Tensor:
    """The sums of blocks of float64 in the order that is drawn above. Zeros behind the end change no sum."""
    rows = _rows(wide, block)
    lanes = pad(rows, (0, -rows.shape[1] % LANES)).unflatten(1, (-1, LANES))
    # A running sum goes through a lane in order, on a CPU: other devices cut it up.
    lanes = lanes.cpu().cumsum(1)[:, -1].to(wide.device)
    lanes = lanes[:, :4] + lanes[:, 4:]
    lanes = lanes[:, :2] + lanes[:, 2:]
    sums: Tensor = lanes[:, 0] + lanes[:, 1]
    return sums


def _mean(sums: Tensor, counts: Tensor) -> Tensor:
    return (sums / counts.clamp(min=1.0)).float()


def _spread(of_blocks: Tensor, block: int, num: int) -> Tensor:
    """The value of each element's block."""
    return of_blocks.repeat_interleave(min(block, max(num, 1)))[:num]


def _of_signs(is_high: Tensor, scales: Tensor, block: int) -> Tensor:
    num = is_high.numel()
    return torch.where(is_high, _spread(scales[0], block, num), _spread(scales[1], block, num))
