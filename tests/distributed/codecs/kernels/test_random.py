"""The generator: reproducible numbers that pass for random ones."""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from weft.distributed.codecs.kernels import derive_key, uniform
from weft.distributed.codecs.kernels.random import mix

NUM = 2**17
FIRST = ["0x96a2d169", "0x2990e32a", "0xc393c82e"]

Uniform = Callable[[int, int], Tensor]


def check_random(uniform: Uniform) -> None:
    """Range, mean, variance, distribution; no correlation between neighbours in counter or key."""
    keys = [derive_key(0), derive_key(1), derive_key(1, 0), derive_key(2**63)]
    streams = [uniform(key, NUM).double() for key in keys]
    for stream in streams:
        assert stream.min() >= 0 and stream.max() < 1
        assert abs(stream.mean() - 0.5) < 5 * (1 / 12 / NUM) ** 0.5
        assert abs(stream.var() - 1 / 12) < 5 * (1 / 180 / NUM) ** 0.5
        check_spread(stream)
        check_spread((stream * 2**12) % 1)  # the low bits as well
        for lag in (1, 2, 3, 8, 16, 256, 1024):
            check_unrelated(stream[lag:], stream[:-lag])
    for i, stream in enumerate(streams):
        for other in streams[:i]:
            for lag in (0, 1, 8):
                check_unrelated(stream[lag:], other[: NUM - lag])
                check_unrelated(other[lag:], stream[: NUM - lag])


def check_spread(stream: Tensor, num_bins: int = 256) -> None:
    counts = torch.histc(stream, num_bins, 0.0, 1.0)
    assert 1e-6 < float(stats.chisquare(counts.numpy()).pvalue) < 1 - 1e-6


def check_unrelated(a: Tensor, b: Tensor) -> None:
    correlation = torch.corrcoef(torch.stack((a, b)))[0, 1]
    assert correlation.abs() < 5 / a.numel() ** 0.5, f"correlation {correlation:.4f}"


def test_numbers_pass_for_random() -> None:
    check_random(uniform)


def half_of(key: int, num: int) -> Tensor:
    return uniform(key, num) / 2


def running(key: int, num: int) -> Tensor:
    """A golden-ratio sequence: perfectly spread, every number foretold by the one before."""
    return (uniform(key, 1) + torch.arange(num) * 0.6180339887) % 1


def without_key(key: int, num: int) -> Tensor:
    """One stream for all keys."""
    return uniform(7, num)


@pytest.mark.parametrize("broken", [half_of, running, without_key])
def test_numbers_that_do_not_pass_are_found(broken: Uniform) -> None:
    with pytest.raises(AssertionError):
        check_random(broken)


def test_every_bit_of_the_counter_and_of_the_key_flips_half_of_the_output() -> None:
    counters = torch.arange(4096)
    for bit in range(32):
        flips = mix(counters, derive_key(3)) ^ mix(counters ^ (1 << bit), derive_key(3))
        share = torch.stack([((flips >> i) & 1).double().mean() for i in range(32)]).mean()
        assert abs(share - 0.5) < 0.02, f"bit {bit} of the counter flips {share:.2f}"


def test_a_key_is_a_function_of_all_its_numbers_in_their_order() -> None:
    keys = [derive_key(*numbers) for numbers in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**64 - 2,)]]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**64 for key in keys)
    assert derive_key(-1) == derive_key(2**64 - 1)


def test_the_first_numbers_are_fixed_for_good() -> None:
    """A new release must not change what a resumed run draws."""
    assert [hex(value) for value in mix(torch.arange(3), 0x0123456789ABCDEF).tolist()] == FIRST
    assert uniform(0x0123456789ABCDEF, 3).tolist() == [(int(value, 16) >> 8) / 2**24 for value in FIRST]
