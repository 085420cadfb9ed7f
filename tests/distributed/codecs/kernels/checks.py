"""Checks of kernels that can be run on any implementation, right or broken, and the tensors to run them on."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs.kernels import definition, native, uniform
from weft.distributed.codecs.kernels.random import derive_key

Kernels = ModuleType | SimpleNamespace

IMPLEMENTATIONS = [
    pytest.param(definition, id="torch"),
    pytest.param(native, id="compiled", marks=pytest.mark.skipif(not native.is_available(), reason="no compiler")),
]
TYPES = [torch.float32, torch.float64]
SIZES = [0, 1, 7, 8, 63, 200, 5000]
KINDS = ["normal", "integers", "tied", "zeros", "strange", "tiny"]


def make(kind: str, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers of a kind that a kernel could get wrong."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    if kind == "integers":
        normal = (3 * normal).round()
    elif kind == "tied":
        normal = normal.sign() * (uniform(derive_key(seed), size) < 0.9)
    elif kind == "zeros":
        normal = torch.where(normal < 0, -0.0, 0.0)
    elif kind == "strange":
        chosen = (6 * uniform(derive_key(seed), size)).long() * (uniform(derive_key(seed + 1), size) < 0.1)
        strange = torch.tensor([0.0, float("nan"), float("inf"), -float("inf"), -0.0, 1e38], dtype=torch.float64)
        normal = torch.where(chosen == 0, normal, strange[chosen])
    elif kind == "tiny":
        normal = normal * 3 * torch.finfo(dtype).tiny  # many are subnormal
    return normal.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, signs of zeros too; anything that is not a number is equal to any other."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(a.equal(b))
    word = {4: torch.int32, 8: torch.int64}[a.itemsize]
    return bool(((a.view(word) == b.view(word)) | (a.isnan() & b.isnan())).all())


def largest(x: Tensor, num: int) -> Tensor:
    """The places of the `num` largest magnitudes by a plain sort of Python numbers."""
    keys = [(float("inf"), 1) if v != v else (abs(v), 0) for v in x.tolist()]
    order = sorted(range(len(keys)), key=lambda i: ((-keys[i][0], -keys[i][1]), i))
    return torch.tensor(sorted(order[:num]), dtype=torch.int32)


def check_selection(kernels: Kernels, x: Tensor, num: int) -> None:
    chosen = kernels.add_and_select(x.clone(), None, 1.0, num)
    assert chosen.equal(largest(x, num)), f"not the {num} largest"


def check_unbiased(kernels: Kernels, x: Tensor, block: int, bits: int, num_rounds: int = 400) -> None:
    """The mean of what is decoded over many keys is within 5 standard errors of x, in every element."""
    norms, total = definition.block_norms(x, block, "max"), torch.zeros_like(x)
    for i in range(num_rounds):
        decoded = torch.empty_like(x)
        kernels.dequantise(kernels.quantise(x, norms, block, bits, derive_key(i)), norms, block, bits, decoded)
        total += decoded
    grid = norms.repeat_interleave(block)[: x.numel()] / (2 ** (bits - 1) - 1)
    error = (total / num_rounds - x) / (grid * 0.5 / num_rounds**0.5)  # in the largest standard error that is possible
    assert error.abs().max() < 5, f"off by {error.abs().max():.1f} standard errors"
    assert error.mean().abs() < 5 / x.numel() ** 0.5, f"all off by {error.mean():.2f} standard errors"
