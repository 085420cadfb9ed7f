"""Numbers that are not finite, in gradients that are compressed: how many of a step's sum they take with them."""

import math

import pytest
import torch

from weft.distributed.codecs import ReductionWork, bucket_of, make_codec
from weft.distributed.group import SoloGroup
from weft.specs import parse_plan

IN_PLACE = ("fp16", "bf16", "bf16(round=stochastic)", "topk(0.1)", "topk(0.1,select=sampled)", "threshold", "dgc(0.1)")
SPREAD = ("qsgd(4)", "terngrad", "onebit", "sign", "powersgd(2)", "randomk(0.1)")


def sent_and_kept(text: str, value: float) -> tuple[int, int]:
    """How many numbers are not finite in the sum, and in what is kept back."""
    codec, group = make_codec(parse_plan(f"data=4 compress={text}").compress), SoloGroup()
    message = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    message[3, 4] = value
    bucket = bucket_of({"w": message})
    total = ReductionWork(group, codec.reduce(bucket, codec.encode(bucket, message), group)).wait()
    kept = [one.tensor for name, one in codec.memory().items() if name.startswith("residual")]
    return _count(total), sum(map(_count, kept))


def _count(tensor: torch.Tensor) -> int:
    return int((~tensor.isfinite()).sum())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_shown_at_once(value: float) -> None:
    assert {sent_and_kept(text, value) for text in IN_PLACE} == {(1, 0)}
    assert all(sent > 1 and kept == 0 for sent, kept in (sent_and_kept(text, value) for text in SPREAD))
