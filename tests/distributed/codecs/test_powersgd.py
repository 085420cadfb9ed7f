"""PowerSGD on gradients of little rank, or of none, where Gram and Schmidt's columns hang on each other."""

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.kernels.checks import IMPLEMENTATIONS, Kernels, same_bits
from weft.distributed.codecs import ReductionWork, bucket_of
from weft.distributed.codecs.kernels import definition
from weft.distributed.codecs.powersgd import PowerSgdCodec
from weft.distributed.group.calls import AllReduce
from weft.distributed.group.solo import SoloGroup


def outer(rank: int, seed: int = 0) -> Tensor:
    """A matrix of so many dimensions."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(64, rank, generator=generator) @ torch.randn(rank, 48, generator=generator)


def send(codec: PowerSgdCodec, gradient: Tensor) -> Tensor:
    group, bucket = SoloGroup(), bucket_of({"w": gradient})
    return ReductionWork(group, codec.reduce(bucket, codec.encode(bucket, gradient), group)).wait().view(64, 48)


def kept_by(codec: PowerSgdCodec) -> Tensor:
    return codec.memory()["residual/w"].tensor


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_a_basis_is_orthogonal_or_zero(kernels: Kernels, rank: int) -> None:
    matrix = outer(rank)[:, :4].contiguous() if rank else torch.zeros(64, 4)
    expected = matrix.clone()
    kernels.orthogonalise(matrix)
    definition.orthogonalise(expected)
    assert same_bits(matrix, expected)
    product = matrix.T @ matrix
    torch.testing.assert_close(product, torch.diag(product.diagonal().round()))
    assert product.diagonal().round().sum() >= rank


@pytest.mark.parametrize("rank", [1, 2])
def test_a_gradient_of_no_more_rank_than_the_factors_is_sent_whole(rank: int) -> None:
    # Regression: columns of rounding errors were made as long as the others, and were not orthogonal to them: of a
    # gradient of rank 2, 60 of 78 were wrong, and what was kept grew.
    codec = PowerSgdCodec(4)
    for step in range(6):
        gradient = outer(rank, step)
        assert (send(codec, gradient) - gradient).norm() < 1e-4 * gradient.norm()
        assert kept_by(codec).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("gradient", [torch.zeros(64, 48), torch.eye(64, 48)[:1].repeat(64, 1) * torch.eye(64)[:, :1]])
def test_a_first_gradient_of_zeros_or_one_row_stops_nothing(gradient: Tensor) -> None:
    # Regression: factors of zeros were the next step's, and gave zeros again: the weight never moved any more. The
    # first gradient of a layer behind one that begins with zeros (LoRA) is such a one.
    codec = PowerSgdCodec(4)
    send(codec, gradient)
    total, sent = gradient.clone(), torch.zeros(64, 48)
    sent += gradient - kept_by(codec)
    for step in range(8):
        following = outer(3, step)
        total += following
        sent += send(codec, following)
    torch.testing.assert_close(sent + kept_by(codec), total, rtol=0, atol=1e-3)
    assert kept_by(codec).norm() < 1e-3 * total.norm()


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank", [1, 4])
def test_products_of_factors_are_added_up_in_order(kernels: Kernels, rank: int) -> None:
    left, right = torch.randn(33, rank), torch.randn(2100, rank)
    found, expected = torch.empty(33 * 2100), torch.empty(33 * 2100)
    kernels.multiply_factors(left, right, found)
    definition.multiply_factors(left, right, expected)
    assert same_bits(found, expected)
    torch.testing.assert_close(found.view(33, 2100), left @ right.T)


def test_ranks_with_other_numbers_of_threads_have_the_same_bits() -> None:
    # Regression: each rank made its own basis and product, whose sums were cut up by its number of threads.
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            codec = PowerSgdCodec(2)
            gradient = torch.randn(40_000, 8, generator=torch.Generator().manual_seed(0))
            bucket, group = bucket_of({"w": gradient}), SoloGroup()
            first = torch.randn(80_000, generator=torch.Generator().manual_seed(1))  # as the group added it up
            second = torch.randn(16, generator=torch.Generator().manual_seed(2))
            codec.encode(bucket, gradient)
            reduction = codec.reduce(bucket, first, group)
            next(reduction)
            call = next(reduction)
            assert isinstance(call, AllReduce)
            call.tensor.copy_(second)
            with pytest.raises(StopIteration) as end:
                next(reduction)
            found.append(end.value.value)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
