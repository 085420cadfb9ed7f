"""What waits in another unit: by powers of two a codec goes on with the same bits, so many times as large."""

from collections.abc import Callable

import pytest
import torch

from weft.distributed.codecs import AbstractCodec, bucket_of
from weft.distributed.codecs.dgc import DgcCodec
from weft.distributed.codecs.randomk import RandomkCodec
from weft.distributed.codecs.rescaling import rescale_unsent
from weft.distributed.codecs.signs import SignCodec
from weft.distributed.codecs.topk import TopkCodec


def make_dgc() -> DgcCodec:
    codec = DgcCodec(0.1, warmup=2)
    codec.set_momentum(0.9, nesterov=False)
    return codec


CODECS: dict[str, Callable[[], AbstractCodec]] = {
    "topk": lambda: TopkCodec(0.1),
    "dgc": make_dgc,
    "randomk": lambda: RandomkCodec(0.1),
    "sign": lambda: SignCodec(symmetric=True),
}


def last_sent(codec: AbstractCodec, factors: list[float], *, is_told: bool = True) -> torch.Tensor:
    """The message after some steps whose gradients are so many times as large, in the unit of the first."""
    generator = torch.Generator().manual_seed(1)
    decoded, before = torch.empty(0), factors[0]
    for factor in factors:
        gradient = torch.randn(40, generator=generator)
        if is_told and factor != before:
            rescale_unsent(codec, factor / before)
        bucket, before = bucket_of({"w": gradient}), factor
        decoded = codec.decode(bucket, codec.encode(bucket, gradient * factor)).clone()
    return decoded / before


@pytest.mark.parametrize("name", CODECS)
def test_a_scale_that_changes_leaves_the_bits_of_one_that_does_not(name: str) -> None:
    still = last_sent(CODECS[name](), [1.0] * 7)
    assert torch.equal(last_sent(CODECS[name](), [1.0, 1.0, 2.0, 2.0, 8.0, 4.0, 4.0]), still)


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_rescaled_is_found(name: str) -> None:
    still = last_sent(CODECS[name](), [1.0] * 7)
    assert not torch.equal(last_sent(CODECS[name](), [1.0, 1.0, 2.0, 2.0, 8.0, 4.0, 4.0], is_told=False), still)


def test_what_all_ranks_have_alike_stays() -> None:
    codec = make_dgc()
    last_sent(codec, [1.0] * 3)
    before = {name: (kept.kind, kept.tensor.clone()) for name, kept in codec.memory().items()}
    rescale_unsent(codec, 0.5)
    for name, kept in codec.memory().items():
        kind, tensor = before[name]
        assert torch.equal(kept.tensor, tensor * 0.5 if kind == "sum" else tensor)
    assert {kind for kind, _ in before.values()} == {"sum", "global"}
