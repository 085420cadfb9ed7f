"""Cutting parameters into shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.distributed.codecs import Piece
from weft.distributed.placement.cut import ALIGNMENT, cut_evenly, put_together
from weft.training.optimizers import OPTIMIZERS

shapes = st.lists(st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=6)


def make_parameters(sizes: list[tuple[int, ...]]) -> dict[str, Tensor]:
    types = [torch.float32, torch.float64]
    return {
        f"p{i}": torch.arange(float(torch.Size(s).numel()), dtype=types[i % 2]).view(s) for i, s in enumerate(sizes)
    }


@given(shapes, st.integers(1, 5), st.booleans())
def test_every_element_is_in_one_shard(sizes: list[tuple[int, ...]], num_shards: int, may_cut: bool) -> None:
    parameters = make_parameters(sizes)
    shards = cut_evenly(parameters, num_shards, may_cut=may_cut)
    assert len(shards) == num_shards
    for name, parameter in parameters.items():
        pieces = [(piece, piece.of(parameter)) for shard in shards for piece in shard if piece.name == name]
        covered = sorted((piece.begin, piece.end) for piece, _ in pieces)
        assert [begin for begin, _ in covered] == [0, *(end for _, end in covered[:-1])] or not parameter.numel()
        if parameter.numel():
            assert torch.equal(put_together(pieces, parameter), parameter)
            assert may_cut or len(pieces) == 1


@given(shapes, st.integers(1, 5))
def test_shards_are_even_to_one_cut(sizes: list[tuple[int, ...]], num_shards: int) -> None:
    parameters = make_parameters(sizes)
    shards = cut_evenly(parameters, num_shards)
    loads = [sum((piece.end - piece.begin) * parameters[piece.name].element_size() for piece in s) for s in shards]
    assert max(loads) - min(loads) <= 2 * ALIGNMENT * 8


def test_a_tensor_whose_memory_is_in_another_order_stays_whole() -> None:
    parameters = {"w": torch.empty(64, 8, 4, 4).to(memory_format=torch.channels_last)}
    pieces = [piece for shard in cut_evenly(parameters, 3) for piece in shard]
    assert pieces == [Piece("w", 0, 64 * 8 * 16)]


def test_a_counter_is_taken_from_the_first_piece() -> None:
    parts = [(Piece("w", 0, 2), torch.tensor(3.0)), (Piece("w", 2, 4), torch.tensor(3.0))]
    assert put_together(parts, torch.zeros(4)).item() == 3.0


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"torch", "lamb", "lars"}))
@pytest.mark.parametrize("num_shards", [2, 3])
def test_an_update_of_pieces_has_the_bits_of_an_update_of_the_whole(name: str, num_shards: int) -> None:
    """Kernels handle the last elements of a tensor otherwise than the rest; cuts must not move any into that part."""
    optimizer = OPTIMIZERS[name]()
    whole = {"w": torch.randn(37, 29), "b": torch.randn(131), "scale": torch.randn(1)}
    cut = {name: tensor.clone() for name, tensor in whole.items()}
    shards = [
        {f"{piece.name}/{piece.begin}": (piece, piece.of(cut[piece.name])) for piece in shard}
        for shard in cut_evenly(cut, num_shards)
    ]
    state = optimizer.init(whole)
    states = [optimizer.init({key: tensor for key, (_, tensor) in shard.items()}) for shard in shards]
    for _ in range(20):
        gradients = {name: torch.randn_like(tensor) for name, tensor in whole.items()}
        state = optimizer.update(gradients, whole, state, 0.01)
        for i, shard in enumerate(shards):
            own = {key: piece.of(gradients[piece.name]) for key, (piece, _) in shard.items()}
            states[i] = optimizer.update(own, {key: tensor for key, (_, tensor) in shard.items()}, states[i], 0.01)
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
