"""Momentum correction: what waited moves the weights as dense momentum would have moved them; masking stops it then."""

import pytest
import torch
from torch import Tensor

from benchmarks.dgc_momentum import UNMASKED, recipe_for, train, use_masking
from weft.distributed.codecs import AbstractCodec, bucket_of
from weft.distributed.codecs.dgc import DgcCodec
from weft.distributed.codecs.topk import TopkCodec

MOMENTUM, LARGE, WAITING = 0.9, 10.0, 5
GRADIENT = torch.zeros(100)
GRADIENT[0], GRADIENT[WAITING] = LARGE, 1.0


def sent_by(codec: AbstractCodec, num_steps: int, gradient: Tensor = GRADIENT) -> list[Tensor]:
    """One number of a hundred in each step: the first, until the other has grown."""
    bucket = bucket_of({"w": gradient})
    return [codec.decode(bucket, codec.encode(bucket, gradient)).view(-1) for _ in range(num_steps)]


def corrected() -> DgcCodec:
    codec = DgcCodec(0.01, warmup=0)
    codec.set_momentum(MOMENTUM, nesterov=False)
    return codec


def dense_path(num_steps: int) -> float:
    """How far momentum moves a weight under a gradient of 1, in units of the learning rate."""
    velocity = path = 0.0
    for _ in range(num_steps):
        velocity = MOMENTUM * velocity + 1.0
        path += velocity
    return path


def test_what_waited_is_sent_with_its_momentum() -> None:
    sent = sent_by(corrected(), 5)
    assert [float(step[WAITING]) for step in sent[:4]] == [0.0] * 4
    assert float(sent[4][WAITING]) == pytest.approx(dense_path(5), rel=1e-6)


def test_momentum_after_the_sum_counts_what_waited_as_if_it_were_new() -> None:
    """The naive form: after 11 steps a sum of gradients without any momentum, a fifth of where dense ones would be."""
    sent = sent_by(TopkCodec(0.01), 11)
    assert [float(step[WAITING]) for step in sent] == [0.0] * 10 + [11.0]
    assert dense_path(11) > 4 * 11.0


def test_sums_of_clipped_gradients_that_have_nothing_in_common_have_the_norm_that_is_asked_for() -> None:
    """Of four ranks with a weight of 1/4 each; a limit on gradients that are not weighted would make it a quarter."""
    gradients = torch.zeros(4, 100)
    gradients[range(4), range(4)] = 40.0  # of one rank each
    codecs = [DgcCodec(0.05, warmup=0, clip=2.0) for _ in gradients]
    bucket = bucket_of({"w": gradients[0]})
    sent = [codec.encode(bucket, gradient, scale=0.25) for codec, gradient in zip(codecs, gradients, strict=True)]
    total = sum(codec.decode(bucket, message) for codec, message in zip(codecs, sent, strict=True))
    assert float(torch.as_tensor(total).norm()) == pytest.approx(2.0)


def test_gradients_below_the_limit_are_not_clipped() -> None:
    codec, small = DgcCodec(0.05, warmup=0, clip=2.0), torch.zeros(100)
    small[0] = 3.9  # a quarter of which is less than 2 / sqrt(4)
    bucket = bucket_of({"w": small})
    assert float(codec.decode(bucket, codec.encode(bucket, small, scale=0.25)).view(-1)[0]) == pytest.approx(0.975)


def test_masking_lets_no_velocity_go_on() -> None:
    """A gradient of one step: with masking it is sent once, without it comes again and again."""
    once, codec = torch.zeros(100), corrected()
    once[3] = 1.0
    with use_masking(True):
        masked = [sent_by(codec, 1, gradient)[0] for gradient in (once, torch.zeros(100), torch.zeros(100))]
    assert [float(step[3]) for step in masked] == [1.0, 0.0, 0.0]
    codec = corrected()
    with use_masking(False):
        unmasked = [sent_by(codec, 1, gradient)[0] for gradient in (once, torch.zeros(100), torch.zeros(100))]
    assert [round(float(step[3]), 4) for step in unmasked] == [1.0, 0.9, 0.81]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5)]])
def test_large_steps_need_both(seed: int) -> None:
    """As in the table of docs/compression.md (benchmarks/dgc_momentum.py); smaller steps show less of it."""
    right, unmasked, naive = (
        train(name, recipe_for(name, 0.3), seed, 10)["loss"] for name in ("dgc", UNMASKED, "topk")
    )
    assert right < 0.7 * min(unmasked, naive)
