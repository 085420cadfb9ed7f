"""Statistics of codecs: no bias where chance rounds, independent draws, and nothing lost where residuals wait.

A number x lies between two that can be sent, a step s apart; a draw sends one of them. Over n draws the mean of what is
sent has a standard deviation of at most s / (2 sqrt(n)), and the mean over m elements, in units of their steps, one of
1 / (2 sqrt(n m)). It is off by D such deviations with a chance of at most 2 exp(-D^2 / 2) (Hoeffding, 1963): for D = 7
and all 18,000 means that are looked at, less than 10^-6. With n m = 10^6 a bias of 1% of a step is 20 deviations.
"""

import math

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs import AbstractCodec, Bucket, bucket_of, kernels, make_codec
from weft.distributed.codecs.kernels import definition
from weft.specs import parse_plan

NUM_ELEMENTS, NUM_DRAWS = 2000, 500
DEVIATIONS = 7.0
UNBIASED = [
    *(f"qsgd({bits},norm={norm})" for bits in (2, 4, 8) for norm in ("l2", "max")),
    "terngrad(0)",
    "bf16(stochastic)",
    "fp16(stochastic)",
]


def codec_of(text: str, rank: int = 0) -> AbstractCodec:
    return make_codec(parse_plan(f"data=2 compress={text}").compress, rank=rank)


def message() -> Tensor:
    """Uniform, so that numbers lie everywhere between two levels; none is the largest but the last."""
    values = torch.rand(NUM_ELEMENTS, generator=torch.Generator().manual_seed(3)) * 2 - 1
    values[-1] = 1.0
    return values


def step_of(text: str, values: Tensor) -> Tensor:
    """The distance of the two numbers that an element can become."""
    name = text.partition("(")[0]
    if name in ("bf16", "fp16"):
        digits = {"bf16": 8, "fp16": 11}[name]
        exponents: Tensor = torch.frexp(values).exponent
        units: Tensor = torch.ldexp(torch.ones_like(values), exponents - digits)
        return units.double()
    if name == "terngrad":
        return torch.full_like(values, float(values.abs().max())).double()
    levels, norm = 2 ** (int(text[5]) - 1) - 1, "max" if "max" in text else "l2"
    blocks = [
        torch.full_like(b, float(b.abs().max() if norm == "max" else b.double().norm())) for b in values.split(512)
    ]
    steps: Tensor = torch.cat(blocks).double() / levels
    return steps


def draw(codec: AbstractCodec, bucket: Bucket, values: Tensor, number: int) -> Tensor:
    """What is decoded of so many messages, a row for each."""
    return torch.stack([codec.decode(bucket, codec.encode(bucket, values)).view(-1).double() for _ in range(number)])


def errors_of(text: str) -> Tensor:
    """In units of steps, a row for each draw."""
    values = message()
    rows = draw(codec_of(text), bucket_of({"w": values}), values, NUM_DRAWS)
    return (rows - values.double()) / step_of(text, values)


def largest_bias(errors: Tensor) -> float:
    """In deviations: of single elements, of all together, and of all in the direction of their sign."""
    signed = errors * message().sign()
    elements = errors.mean(0).abs().max() * 2 * math.sqrt(len(errors))
    together = [mean.mean().abs() * 2 * math.sqrt(errors.numel()) for mean in (errors, signed)]
    return float(max(elements, *together))


@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_of_what_is_sent_is_what_was_given(text: str) -> None:
    errors = errors_of(text)
    assert bool((errors.abs() < 1.0 + 1e-4).all()), "one of the two nearest is sent"
    assert errors.var() > 0.01, "and not always the same"
    assert largest_bias(errors) < DEVIATIONS


@pytest.mark.parametrize("text", UNBIASED)
def test_a_bias_of_a_hundredth_of_a_step_is_found(text: str) -> None:
    """Away from zero, and all in one direction."""
    errors = errors_of(text)
    assert largest_bias(errors + 0.01) > DEVIATIONS
    assert largest_bias(errors + 0.01 * message().sign()) > DEVIATIONS


@pytest.mark.parametrize("text", UNBIASED)
def test_rounding_to_the_nearest_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a draw that is always one half."""
    for place in (kernels, definition):
        monkeypatch.setattr(place, "uniform", lambda key, num, device="cpu": torch.full((num,), 0.5))
    monkeypatch.setattr(kernels, "quantise", definition.quantise)
    assert largest_bias(errors_of(text)) > DEVIATIONS


def correlation(first: Tensor, second: Tensor) -> float:
    """In deviations from none: of n products of independent errors the mean has one of rms / sqrt(n)."""
    products = (first * second).flatten()
    return float(products.mean().abs() / products.square().mean().sqrt() * math.sqrt(products.numel()))


@pytest.mark.parametrize("text", UNBIASED)
def test_ranks_steps_tensors_and_elements_draw_independently(text: str) -> None:
    values, number = message(), 100
    bucket, other = bucket_of({"w": values}), bucket_of({"v": values})
    own = draw(codec_of(text), bucket, values, number) - values
    of_rank = draw(codec_of(text, rank=1), bucket, values, number) - values
    of_tensor = draw(codec_of(text), other, values, number) - values
    assert correlation(own, of_rank) < DEVIATIONS
    assert correlation(own, of_tensor) < DEVIATIONS
    assert correlation(own[1:], own[:-1]) < DEVIATIONS
    assert correlation(own[:, 1:], own[:, :-1]) < DEVIATIONS
    assert correlation(own, own) > DEVIATIONS, "that of equal draws is found"
    again = draw(codec_of(text), bucket, values, 1) - values
    assert torch.equal(again[0], own[0]), "a rank that begins again draws the same"


# ---- error feedback: what was sent and what waits are what was given

KEEPING = ["onebit(block=64)", "sign(block=64)", "topk(0.02)", "topk(0.02,sampled)", "threshold(1.5)", "randomk(0.02)"]


def residual_of(codec: AbstractCodec) -> Tensor:
    return codec.memory()["residual/w"].tensor.view(-1).double()


def sent_and_kept(text: str, messages: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The sums, in float64, of what was given and what was decoded; and the residual."""
    codec, bucket = codec_of(text), bucket_of({"w": messages[0]})
    given = torch.stack(messages).double().sum(0)
    sent = sum(codec.decode(bucket, codec.encode(bucket, message)).view(-1).double() for message in messages)
    assert isinstance(sent, Tensor)
    return given, sent, residual_of(codec)


def whole_numbers(dtype: torch.dtype, number: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-1000, 1000, (NUM_ELEMENTS,), generator=generator).to(dtype) for _ in range(number)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", [text for text in KEEPING if "block" not in text])
def test_nothing_is_lost_of_whole_numbers(text: str, dtype: torch.dtype) -> None:
    """Sums of whole numbers are exact, so every bit must be there."""
    given, sent, kept = sent_and_kept(text, whole_numbers(dtype))
    assert torch.equal(sent + kept, given)
    assert bool(kept.any()) and bool(sent.any())


@pytest.mark.parametrize("text", KEEPING)
def test_nothing_is_lost_of_float32_in_float64(text: str) -> None:
    """Numbers of float32 that are kept in float64: multiples of 2^-24 below 2^9 have exact sums, and so have means of
    blocks, which travel in float32, unless they are much smaller than the numbers."""
    generator = torch.Generator().manual_seed(6)
    grid = [torch.randint(-(2**24), 2**24, (NUM_ELEMENTS,), generator=generator).double() * 2.0**-22 for _ in range(20)]
    given, sent, kept = sent_and_kept(text, grid)
    assert torch.equal(sent + kept, given)
    assert bool(kept.any()) and bool(sent.any())


@pytest.mark.parametrize("text", KEEPING)
def test_float32_loses_no_more_than_its_rounding(text: str) -> None:
    generator = torch.Generator().manual_seed(7)
    messages = [torch.randn(NUM_ELEMENTS, generator=generator) for _ in range(20)]
    given, sent, kept = sent_and_kept(text, messages)
    largest = float(torch.stack(messages).abs().sum(0).max())
    assert float((sent + kept - given).abs().max()) < 20 * 2.0**-23 * largest


@pytest.mark.parametrize("text", KEEPING)
def test_a_residual_that_is_dropped_is_found(text: str) -> None:
    codec, messages = codec_of(text), whole_numbers(torch.float64, 5)
    bucket, sent = bucket_of({"w": messages[0]}), torch.zeros(NUM_ELEMENTS, dtype=torch.float64)
    for message in messages:
        codec.remember({})
        sent += codec.decode(bucket, codec.encode(bucket, message)).view(-1)
    assert not torch.equal(sent + residual_of(codec), torch.stack(messages).sum(0))
