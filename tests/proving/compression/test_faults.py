"""Faults of lossy compression, planted one by one: the proof finds each."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.test_schemes import prove
from weft.distributed.codecs import Reduction, dgc, gathered, kernels, scatter_encoded
from weft.distributed.codecs.bytes import AbstractByteCodec
from weft.distributed.codecs.counting import MessageCounter
from weft.distributed.codecs.dgc import DgcCodec
from weft.distributed.codecs.kernels import definition
from weft.distributed.codecs.powersgd import PowerSgdCodec
from weft.distributed.codecs.qsgd import QsgdCodec
from weft.distributed.codecs.randomk import RandomkCodec
from weft.distributed.placement import buckets, exchange, reducers
from weft.torch_private import use_determinism

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def determinism() -> Iterator[None]:
    with use_determinism():
        yield


def no_error_feedback(patch: Patch) -> None:
    """What was kept is forgotten before the next message."""
    for kind in (AbstractByteCodec, RandomkCodec, PowerSgdCodec):
        encode = kind.encode

        def forgetful(codec: Any, *given: Any, _encode: Any = encode, **more: Any) -> Tensor:
            waiting = codec._waiting.values() if hasattr(codec, "_waiting") else [codec._residuals]
            for residuals in waiting:
                residuals.restore({})
            sent: Tensor = _encode(codec, *given, **more)
            return sent

        patch.setattr(kind, "encode", forgetful)


def momentum_after_the_sum(patch: Patch) -> None:
    """Momentum is left to the optimizer, as with top-k."""
    patch.setattr(DgcCodec, "takes_momentum", False)


def momentum_lost(patch: Patch) -> None:
    patch.setattr(DgcCodec, "set_momentum", lambda codec, momentum, *, nesterov: None)


def momentum_not_masked(patch: Patch) -> None:
    """Velocities go on where they were sent."""
    take = kernels.take
    patch.setattr(kernels, "take", lambda kept, places, velocity=None: take(kept, places))


def warm_up_ignored(patch: Patch) -> None:
    patch.setattr(dgc, "warm_ratio", lambda ratio, warmup, number: ratio)


def nearest_level(patch: Patch) -> None:
    """A draw that is always one half: biased."""
    patch.setattr(definition, "uniform", lambda key, num, device="cpu": torch.full((num,), 0.5))
    patch.setattr(kernels, "quantise", definition.quantise)


def nearest_half(patch: Patch) -> None:
    patch.setattr(kernels, "uniform", lambda key, num, device="cpu": torch.full((num,), 0.5))


def same_draws_in_every_step(patch: Patch) -> None:
    patch.setattr(MessageCounter, "next", lambda counter, bucket: 0)


def same_draws_on_every_rank(patch: Patch) -> None:
    key = MessageCounter.key
    patch.setattr(MessageCounter, "key", staticmethod(lambda bucket, number, rank: key(bucket, number, 0)))


def other_packing(patch: Patch) -> None:
    """Buckets of 1 kB, where the documentation says 1 MiB."""
    patch.setattr(exchange, "plan_buckets", partial(buckets.plan_buckets, packed_bytes=1000))


def no_warm_start(patch: Patch) -> None:
    """PowerSGD begins every step with a fresh draw."""
    encode = PowerSgdCodec.encode

    def cold(codec: Any, *given: Any, **more: Any) -> Tensor:
        codec._rights.clear()
        return encode(codec, *given, **more)

    patch.setattr(PowerSgdCodec, "encode", cold)


def own_values_exact(patch: Patch) -> None:
    """Each rank adds its own numbers as they were, and the others' as they were sent."""
    write, reduce = QsgdCodec.write, gathered.AbstractGatheredCodec.reduce
    exact: dict[tuple[int, Any], Tensor] = {}

    def noting(codec: Any, bucket: Any, message: Tensor, scale: float, out: Tensor) -> Tensor:
        exact[id(codec), bucket.pieces] = message * scale
        return write(codec, bucket, message, scale, out)

    def partial_reduce(codec: Any, bucket: Any, sent: Tensor, *given: Any, **more: Any) -> Reduction:
        own = exact[id(codec), bucket.pieces] - codec.decode(bucket, sent).view(-1)
        total = yield from reduce(codec, bucket, sent, *given, **more)
        total.view(-1).add_(own)
        return total

    patch.setattr(QsgdCodec, "write", noting)
    patch.setattr(gathered.AbstractGatheredCodec, "reduce", partial_reduce)


def owner_keeps_exact(patch: Patch) -> None:
    """The owner of a part adds its own numbers as they were: all ranks are told the same, which is wrong."""

    def faulty(codec: Any, part: Any, sent: Any, group: Any, out: Tensor) -> Reduction:
        exact = out.clone() / group.size
        own = exact - codec.decode(part, sent[group.rank]).view_as(exact)
        total = yield from scatter_encoded(codec, part, sent, group, out)
        return total.add_(own)

    patch.setattr(reducers, "scatter_encoded", faulty)


DATA, SHARD, LOCAL = "data=2 topology=direct", "shard=2 topology=direct", "data=2 consistency=local(2) topology=direct"
Fault = Callable[[Patch], None]
FAULTS: list[tuple[Fault, str, str]] = [
    *[
        (no_error_feedback, DATA, codec)
        for codec in ("onebit", "sign", "topk(0.05)", "threshold(0.01)", "randomk(0.05)", "dgc(0.02)", "powersgd(2)")
    ],
    (no_error_feedback, LOCAL, "topk(0.05)"),
    (no_error_feedback, SHARD, "sign"),
    (momentum_after_the_sum, DATA, "dgc(0.02)"),
    (momentum_lost, DATA, "dgc(0.02)"),
    (momentum_not_masked, DATA, "dgc(0.02)"),
    (warm_up_ignored, DATA, "dgc(0.02,warmup=3)"),
    (nearest_level, DATA, "qsgd(4)"),
    (nearest_level, DATA, "terngrad"),
    (nearest_half, DATA, "bf16(round=stochastic)"),
    (same_draws_in_every_step, DATA, "qsgd(8)"),
    (same_draws_in_every_step, DATA, "randomk(0.05)"),
    (same_draws_on_every_rank, DATA, "terngrad"),
    (other_packing, DATA, "topk(0.05)"),
    (other_packing, DATA, "qsgd(8)"),
    (no_warm_start, DATA, "powersgd(2)"),
    (own_values_exact, DATA, "qsgd(8)"),
    (owner_keeps_exact, SHARD, "qsgd(8)"),
    (owner_keeps_exact, SHARD, "topk(0.05)"),
]


@pytest.mark.parametrize(("fault", "plan", "codec"), FAULTS, ids=[f"{f.__name__}-{p}-{c}" for f, p, c in FAULTS])
def test_the_proof_finds_the_fault(fault: Fault, plan: str, codec: str, tmp_path: Path, monkeypatch: Patch) -> None:
    fault(monkeypatch)
    proof = prove(f"{plan} compress={codec}", tmp_path)
    assert not proof.passed
