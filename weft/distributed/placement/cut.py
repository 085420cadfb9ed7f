"""How parameters are cut into shards: evenly by bytes, large tensors into pieces.

parameters   [      w1 (60)      ][ b1 (4) ][       w2 (60)       ]
2 shards     |--- shard 0: w1, b1 ---------||--- shard 1: w2 -----|
3 shards     |- w1[:41] -||- w1[41:], b1, w2[:19] -||- w2[19:] ---|      bounds lie at multiples of 64 in truth
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from weft.distributed.codecs import Piece

__all__ = ["ALIGNMENT", "cut_evenly", "put_together"]

ALIGNMENT = 64
"""Elements. Kernels treat the last few elements of a tensor in another way than the rest: cuts at multiples of their
widest stride leave every element where it was, and an update of the pieces has the bits of an update of the whole."""


def cut_evenly(
    parameters: Mapping[str, Tensor], num_shards: int, *, may_cut: bool = True
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each shard; whole tensors, to the shard with the fewest bytes, where none may be cut."""
    if not may_cut:
        return _deal_whole(parameters, num_shards)
    total = sum(parameter.nbytes for parameter in parameters.values())
    shards: list[list[Piece]] = [[] for _ in range(num_shards)]
    passed = 0  # bytes before this parameter
    for name, parameter in parameters.items():
        size = parameter.element_size()
        # Where the shards' bounds fall in this parameter, in elements.
        bounds = [(total * shard / num_shards - passed) / size for shard in range(1, num_shards)]
        # A tensor whose memory is not in its order (channels last) has no pieces that are views.
        stride = ALIGNMENT if parameter.is_contiguous() else max(1, parameter.numel())
        ends = [_round(bound, parameter.numel(), stride) for bound in bounds]
        for shard, (begin, end) in enumerate(zip([0, *ends], [*ends, parameter.numel()], strict=True)):
            if begin < end or (shard == 0 and parameter.numel() == 0):  # one that is empty has an owner too
                shards[shard].append(Piece(name, begin, end))
        passed += parameter.nbytes
    return tuple(tuple(pieces) for pieces in shards)


def _round(bound: float, num_elements: int, stride: int) -> int:
    """The nearest place where a cut may lie, within the tensor: at a multiple of the stride, or at its end."""
    inside = min(max(bound, 0), num_elements)
    below = int(inside // stride * stride)
    above = min(below + stride, num_elements)
    return below if inside - below <= above - inside else above


def _deal_whole(parameters: Mapping[str, Tensor], num_shards: int) -> tuple[tuple[Piece, ...], ...]:
    """Largest first; within a shard in the model's order."""
    load, owners = [0] * num_shards, dict[str, int]()
    for name, parameter in sorted(parameters.items(), key=lambda item: (-item[1].nbytes, item[0])):
        owners[name] = load.index(min(load))
        load[owners[name]] += parameter.nbytes
    return tuple(
        tuple(Piece(name, 0, p.numel()) for name, p in parameters.items() if owners[name] == shard)
        for shard in range(num_shards)
    )


def put_together(pieces: Sequence[tuple[Piece, Tensor]], like: Tensor) -> Tensor:
    """The whole of pieces in any order; a tensor that is not of its piece's size (a counter) is taken from the first.

    >>> import torch
    >>> parts = [(Piece("w", 2, 3), torch.tensor([3.0])), (Piece("w", 0, 2), torch.tensor([1.0, 2.0]))]
    >>> put_together(parts, torch.zeros(3, 1)).tolist()
    [[1.0], [2.0], [3.0]]
    """
    ordered = sorted(pieces, key=lambda item: item[0].begin)
    first, tensor = ordered[0]
    if first.is_whole(like) or any(part.numel() != piece.end - piece.begin for piece, part in ordered):
        return tensor.clone()
    whole = tensor.new_empty(like.numel())
    for piece, part in ordered:
        whole[piece.begin : piece.end] = part.reshape(-1)
    return whole.view(like.shape)
