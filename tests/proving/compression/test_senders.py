"""The equations of every compression against its codec, on messages alone: two programs, the same bits."""

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs import Bucket, Piece, make_codec
from weft.distributed.codecs.kernels import derive_key, uniform
from weft.distributed.codecs.kernels.random import mix
from weft.proving.compression.compression import OfSenders
from weft.proving.compression.draws import bits_at, derive, uniform_at
from weft.proving.compression.messages import Message, Range, messages_of_gradients, messages_of_weights
from weft.proving.compression.schemes import dgc, onebit, qsgd, sign, terngrad, threshold, topk
from weft.proving.compression.sender import Setting
from weft.specs import parse_plan
from weft.specs.plan import Choice, value_of

SCHEMES = {
    "qsgd(2)": qsgd,
    "qsgd(4,norm=max)": qsgd,
    "qsgd(8,block=100)": qsgd,
    "terngrad": terngrad,
    "terngrad(0)": terngrad,
    "onebit(block=64)": onebit,
    "sign(block=4096)": sign,
    "topk(0.03)": topk,
    "topk(0.03,select=sampled)": topk,
    "threshold(0.5)": threshold,
    "dgc(0.02,warmup=2)": dgc,
    "dgc(0.02,warmup=0,clip=0.5)": dgc,
}
SIZES = {"w": (130, 140), "b": (57,), "one": (1,)}
MOMENTUM = 0.9


def message_of(sizes: dict[str, tuple[int, ...]]) -> tuple[Bucket, Message]:
    numbers = {name: torch.Size(shape).numel() for name, shape in sizes.items()}
    pieces = tuple(Piece(name, 0, number) for name, number in numbers.items())
    ranges = tuple(Range(name, 0, numbers[name], shape) for name, shape in sizes.items())
    return Bucket(pieces, tuple(sizes.values()), torch.float32), Message(ranges)


def numbers(size: int, step: int) -> Tensor:
    """Most of them small, some alike, some zero; more than a sample has."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(size, generator=generator) * torch.rand(size, generator=generator) ** 3
    values[::7] = values[0]
    values[3::11] = 0.0
    return values


@pytest.mark.parametrize("is_nesterov", [False, True])
@pytest.mark.parametrize("text", SCHEMES)
def test_what_is_decoded_is_what_the_equations_say(text: str, is_nesterov: bool) -> None:
    choice = with_defaults(text)
    codec = make_codec(choice, rank=1)
    if codec.takes_momentum:
        codec.set_momentum(MOMENTUM, nesterov=is_nesterov)
    compression = SCHEMES[text](Setting(choice, 2, 2, MOMENTUM, is_nesterov))
    assert isinstance(compression, OfSenders)
    bucket, message = message_of(SIZES)
    for step in range(4):
        values = numbers(bucket.num_elements, step)
        found = codec.decode(bucket, codec.encode(bucket, values, scale=0.375)).view(-1)
        expected = compression.senders[1].send(message, values, 0.375)
        assert torch.equal(found, expected), step
        assert bool(expected.any())


def with_defaults(text: str) -> Choice:
    choice = parse_plan(f"data=2 compress={text}").compress
    return Choice(choice.name, tuple({**value_of("compress", choice).parameters, **dict(choice.parameters)}.items()))


def test_draws_are_those_of_the_kernels() -> None:
    for numbers_ in [(0,), (1, 2), (2**40, 7, 3)]:
        key = derive(*numbers_)
        assert key == derive_key(*numbers_)
        assert torch.equal(torch.from_numpy(uniform_at(key, 1000)), uniform(key, 1000))
        assert bits_at(key, 1000).tolist() == mix(torch.arange(1000), key).tolist()


def test_messages_are_filled_from_the_last_parameter_to_the_first() -> None:
    mebibyte = 2**18
    shapes = {"w1": mebibyte, "b1": 3, "w2": mebibyte // 2, "b2": mebibyte // 2, "b3": 5}
    parameters = {name: torch.zeros(size, requires_grad=True) for name, size in shapes.items()}
    parameters["frozen"] = torch.zeros(4)
    parameters["wide"] = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    names = [[own.name for own in message.ranges] for message in messages_of_gradients(parameters)]
    assert names == [["wide"], ["b3", "b2", "w2"], ["b1"], ["w1"]]


def test_parts_of_owners_are_messages_of_their_own() -> None:
    parameters = {"w": torch.zeros(256, requires_grad=True), "b": torch.zeros(64, requires_grad=True)}
    first, second = messages_of_gradients(parameters, 2)
    assert [(own.name, own.begin, own.end) for own in first.ranges] == [("b", 0, 64), ("w", 0, 64)]
    assert [(own.name, own.begin, own.end) for own in second.ranges] == [("w", 64, 256)]


def test_differences_of_weights_travel_together() -> None:
    parameters = {"w": torch.zeros(2), "scale": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(3)}
    assert [[own.name for own in m.ranges] for m in messages_of_weights(parameters)] == [["w", "b"], ["scale"]]
