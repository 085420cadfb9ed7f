"""The contract suite over every codec, and the broken ones that it must catch."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs import contract
from weft.distributed.codecs import (
    AbstractCodec,
    Bucket,
    Empty,
    ExactCodec,
    HalfCodec,
    Kept,
    Reduction,
    make_codec,
)
from weft.distributed.codecs.qsgd import QsgdCodec
from weft.distributed.codecs.signs import SignCodec
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import ReduceOp
from weft.errors import EncodingError
from weft.planning.codec_cost import CodecCost
from weft.specs import Choice
from weft.specs.axes import AXES

CODECS: dict[str, contract.MakeCodec] = {
    **{name: partial(make_codec, Choice(name)) for name, v in AXES["compress"].items() if v.is_available},
    "dgc": partial(make_codec, Choice("dgc", (("ratio", 0.1), ("warmup", 0)))),
    "bf16, stochastic": partial(make_codec, Choice("bf16", (("round", "stochastic"),))),
    "fp16, stochastic": partial(make_codec, Choice("fp16", (("round", "stochastic"),))),
    "qsgd of 2 bits": partial(make_codec, Choice("qsgd", (("bits", 2), ("block", 8)))),
    "qsgd of 4 bits, largest": partial(make_codec, Choice("qsgd", (("bits", 4), ("norm", "max")))),
    "topk, sampled": partial(make_codec, Choice("topk", (("ratio", 0.2), ("select", "sampled")))),
    "topk, split": partial(make_codec, Choice("topk", (("ratio", 0.2), ("sum", "split")))),
    "topk, dense": partial(make_codec, Choice("topk", (("ratio", 0.2), ("sum", "dense")))),
    "topk of a third": partial(make_codec, Choice("topk", (("ratio", 1 / 3),))),
    "powersgd of rank 1": partial(make_codec, Choice("powersgd", (("rank", 1),))),
}


@pytest.mark.parametrize("check", contract.CHECKS.values(), ids=contract.CHECKS)
@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
def test_every_codec_keeps_the_contract(make: contract.MakeCodec, check: Callable[[contract.MakeCodec], None]) -> None:
    check(make)


@final
class Planted(AbstractCodec):
    """Another codec, with some of its methods replaced by functions of it and their arguments."""

    def __init__(self, inner: AbstractCodec, **faults: Callable[..., Any]) -> None:
        self._inner = inner
        self._faults = faults

    def _call(self, method: str, *arguments: Any) -> Any:
        fault = self._faults.get(method)
        return fault(self._inner, *arguments) if fault else getattr(self._inner, method)(*arguments)

    @property
    def is_exact(self) -> bool:
        return self._inner.is_exact

    @property
    def is_summable(self) -> bool:
        return self._inner.is_summable

    def make_memory(self, bucket: Bucket, empty: Empty) -> Tensor | None:
        return self._inner.make_memory(bucket, empty)

    @property
    def carries_weights(self) -> bool:
        return self._inner.carries_weights

    def encode(
        self, bucket: Bucket, message: Tensor, out: Tensor | None = None, *, share: float = 1.0, scale: float = 1.0
    ) -> Tensor:
        found: Tensor = self._call("encode", bucket, message, out)
        return found

    def reduce(
        self, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp = "sum", out: Tensor | None = None
    ) -> Reduction:
        found: Reduction = self._call("reduce", bucket, sent, group, op, out)
        return found

    def decode(self, bucket: Bucket, sent: Tensor, out: Tensor | None = None) -> Tensor:
        found: Tensor = self._call("decode", bucket, sent, out)
        return found

    def is_waiting(self, name: str) -> bool:
        found: bool = self._call("is_waiting", name)
        return found

    def memory(self) -> Mapping[str, Kept]:
        found: Mapping[str, Kept] = self._call("memory")
        return found

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        self._call("remember", memory)

    def cost(self, bucket: Bucket) -> CodecCost:
        found: CodecCost = self._call("cost", bucket)
        return found


def alter(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    return codec.encode(bucket, message.mul_(0.5), out)


def overflow(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    return message.half()


def draw(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    return codec.encode(bucket, message + 0.1 * torch.rand(message.shape), out)


def drop_residual(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    codec.remember({})
    return codec.encode(bucket, message, out)


def keep_exact_own(
    codec: AbstractCodec, bucket: Bucket, sent: Tensor, group: AbstractGroup, op: ReduceOp, out: Tensor
) -> Any:
    """The owner adds its own message as it was, and not as the others decode it."""
    own, decoded = out.clone(), codec.decode(bucket, sent)
    total = yield from codec.reduce(bucket, sent, group, op, out)
    return total.add_(own - decoded)


def keep_what_is_not_finite(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    sent = codec.encode(bucket, message, out)
    residual = codec.memory()["residual/w"].tensor
    residual[0, 0] = math.inf if residual.dim() > 1 and not message.isfinite().all() else residual[0, 0]
    return sent


def write_as_the_script_does(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    return codec.encode(bucket, message.to(torch.get_default_dtype()).to(message.dtype), out)


def count_for_all(codec: AbstractCodec) -> Mapping[str, Kept]:
    """One count for all buckets."""
    memory = dict(codec.memory())
    count = max(int(kept.tensor) for kept in memory.values())
    return {name: Kept(torch.tensor(count), "global") for name in memory}


def forget_scale(codec: AbstractCodec, bucket: Bucket, message: Tensor, out: Tensor | None) -> Tensor:
    return codec.encode(bucket, message, out)


def believe(codec: AbstractCodec, bucket: Bucket, sent: Tensor, out: Tensor | None) -> Tensor:
    flat = torch.zeros(bucket.num_elements, dtype=bucket.dtype)
    flat[: sent.numel()] = sent.reshape(-1).real.to(bucket.dtype)
    return flat if out is None else out.copy_(flat)


BROKEN: dict[str, tuple[contract.MakeCodec, str]] = {
    "alters the message": (lambda: Planted(HalfCodec("bf16"), encode=alter), "neither_end_changes_what_it_is_given"),
    "overflows": (lambda: Planted(HalfCodec("fp16"), encode=overflow), "finite_stays_finite"),
    "rounds by chance": (lambda: Planted(HalfCodec("bf16"), encode=draw), "rounding_twice_is_rounding_once"),
    "ranks differ": (lambda: Planted(HalfCodec("bf16"), encode=draw), "two_ranks_encode_alike"),
    "owner keeps exact values": (lambda: Planted(SignCodec(), reduce=keep_exact_own), "all_ranks_have_the_same_sum"),
    "no error feedback": (lambda: Planted(SignCodec(), encode=drop_residual), "what_is_not_sent_is_kept"),
    "residual lost": (lambda: Planted(SignCodec(), remember=lambda codec, memory: None), "memory_goes_on"),
    "no scale": (lambda: Planted(SignCodec(), encode=forget_scale), "scale_is_that_of_the_message"),
    "loses a little": (lambda: Planted(SignCodec(), encode=drop_residual), "sent_and_kept_are_exact_in_float64"),
    "another cost": (lambda: Planted(HalfCodec("bf16"), cost=lambda c, b: CodecCost(1.0)), "cost_is_what_is_counted"),
    "forgets its memory": (lambda: Planted(SignCodec(), memory=lambda codec: {}), "cost_is_what_is_counted"),
    "believes anything": (lambda: Planted(HalfCodec("bf16"), decode=believe), "what_is_no_message_is_refused"),
    "infinity waits": (
        lambda: Planted(SignCodec(), encode=keep_what_is_not_finite),
        "what_is_not_finite_shows_in_one_step",
    ),
    "does not know what waits": (lambda: Planted(SignCodec(), is_waiting=lambda c, name: False), "what_waits_is_known"),
    "cannot send nothing": (
        lambda: Planted(HalfCodec("bf16"), encode=lambda c, bucket, *rest: c.encode(bucket, *rest).view(-1)[:0]),
        "nothing_is_an_empty_message",
    ),
    "type of the script": (
        lambda: Planted(SignCodec(), encode=write_as_the_script_does),
        "the_default_type_of_a_script_changes_nothing",
    ),
    "one count for all": (
        lambda: Planted(QsgdCodec(4), memory=count_for_all),
        "buckets_that_are_sent_unequally_often_go_on",
    ),
    "another type": (
        lambda: Planted(ExactCodec(), decode=lambda codec, bucket, sent, out: sent.double()),
        "what_is_decoded_is_a_message",
    ),
}


@pytest.mark.parametrize(("make", "check"), BROKEN.values(), ids=BROKEN)
def test_a_broken_codec_is_caught(make: contract.MakeCodec, check: str) -> None:
    with pytest.raises((AssertionError, EncodingError)):
        contract.CHECKS[check](make)
