"""Bytes of compressed gradients: what a step reports is what the network counts, and as few as each scheme promises."""

import pytest
import torch
from torch import Tensor, nn

from weft.distributed.codecs import AbstractCodec, bucket_of, make_codec
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import GradientExchange
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.virtual import VirtualResult, run_virtual
from weft.specs import parse_plan
from weft.specs.plan import Choice
from weft.training.replicas import Traffic

SIZE = 4
PROMISED = {"onebit": 31.0, "sign": 31.0, "terngrad": 15.0, "qsgd(4)": 7.5, "qsgd(2)": 15.0, "bf16": 2.0}
"""Times as many bytes as float32 has, headers and padding included."""


def choice_of(text: str) -> Choice:
    return parse_plan(f"data={SIZE} compress={text}").compress


def gradients(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = {"w1": (60, 40), "b1": (40,), "w2": (40, 10), "b2": (10,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def exchange(text: str, num_steps: int) -> VirtualResult:
    """What every rank reports of its last step."""

    def program(group: AbstractGroup) -> Traffic:
        parameters = {name: nn.Parameter(torch.zeros_like(g)) for name, g in gradients(0).items()}
        exchange = GradientExchange(group, parameters, make_codec(choice_of(text), rank=group.rank))
        for _ in range(num_steps):
            exchange.begin(1 / SIZE)
            for name, gradient in gradients(group.rank).items():
                exchange.add(name, gradient)
            exchange.wait()
        return exchange.traffic()

    return run_virtual(program, SIZE)


def second_step(text: str) -> tuple[tuple[Traffic, ...], list[int]]:
    """What every rank reports, and what the network counted besides the losses: the first step may probe the links."""

    def report(group: AbstractGroup) -> None:
        """Of the loss, parameters that had a gradient, and, by a codec, those of which a value did not fit."""
        num_numbers = 1 + (1 if text == "none" else 2) * len(gradients(0))
        group.all_reduce(torch.zeros(num_numbers, dtype=torch.float64))

    one, two, besides = exchange(text, 1), exchange(text, 2), run_virtual(report, SIZE)
    sent = zip(two.bytes_sent, one.bytes_sent, besides.bytes_sent, strict=True)
    return two.results, [both - first - report for both, first, report in sent]


@pytest.mark.parametrize(
    "text", ["none", "bf16", "qsgd(4)", "terngrad", "onebit", "topk(0.1)", "randomk(0.1)", "dgc(0.1)", "powersgd(2)"]
)
def test_a_step_reports_the_bytes_that_the_network_counts(text: str) -> None:
    reported, counted = second_step(text)
    assert [traffic.wire_bytes for traffic in reported] == pytest.approx(counted, abs=SIZE)  # parts are whole elements
    dense = 4 * sum(gradient.numel() for gradient in gradients(0).values())
    for traffic in reported:
        assert (traffic.dense_bytes, traffic.payload_bytes) == (
            (0, 0) if text == "none" else (dense, traffic.num_bytes)
        )


def test_both_factors_count() -> None:
    # Regression: only the left factor, which `encode` returns, was counted.
    (traffic, *_), _ = second_step("powersgd(2)")
    assert traffic.payload_bytes == 4 * (2 * (60 + 40) + 40 + 2 * (40 + 10) + 10)


def sent_bytes(codec: AbstractCodec, parameters: dict[str, Tensor]) -> int:
    """Of one step's messages, in the buckets that gradients travel in."""
    buckets = plan_buckets(parameters)
    return sum(codec.encode(bucket, torch.ones(bucket.num_elements)).nbytes for bucket in buckets)


@pytest.mark.parametrize(("text", "promised"), PROMISED.items())
def test_messages_are_as_small_as_promised(text: str, promised: float) -> None:
    generator = torch.Generator().manual_seed(0)
    message = torch.randn(1_000_000, generator=generator)
    bucket = bucket_of({"w": message})
    sent = make_codec(choice_of(text)).encode(bucket, message)
    assert message.nbytes / sent.nbytes >= promised


@pytest.mark.parametrize(("text", "promised"), PROMISED.items())
def test_all_messages_of_a_large_model_are_as_small_as_promised(text: str, promised: float) -> None:
    sizes = [(784, 4608), (4608,), (4608, 4608), (4608,), (4608, 10), (10,)]
    parameters: dict[str, Tensor] = {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    assert num_bytes > 4 * 24e6
    assert num_bytes / sent_bytes(make_codec(choice_of(text)), parameters) >= promised
