"""Codecs that keep back what they do not send, in every scheme: nothing is lost, and nothing is sent twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.codecs.test_schemes import run_case
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import case_of, small_mlp
from weft.distributed.codecs import AbstractCodec, make_codec, reduction
from weft.distributed.consistency.local import LocalAveraging
from weft.distributed.consistency.server import ServedReplicas
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import DataParallel
from weft.distributed.placement import reducers as reducers_module
from weft.distributed.placement.bucket_cut import cut_bucket
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.realise import RunSpec
from weft.graph import State
from weft.proving.own_pace import train_to_the_end
from weft.specs import parse_plan
from weft.torch_private import use_determinism
from weft.training.optimizers import SGD, Optimizer
from weft.training.replicas import AbstractReplicas, Update
from weft.training.results import hash_tensors

SHAPES = {"w2": (24, 16), "b1": (40,), "w1": (16, 12)}
LR = 0.5
WITH_MEMORY = ["onebit", "sign", "topk(0.1)", "topk(0.1,sampled)", "threshold(0.5)"]
IN_GROUPS = [*WITH_MEMORY, "randomk(0.1)", "powersgd(2)"]


def make_parameters() -> dict[str, Tensor]:
    return {name: torch.zeros(shape).requires_grad_() for name, shape in SHAPES.items()}


def gradients_of(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Course:
    """Of one rank: where it has come, all of its gradients, and what it has not sent."""

    weights: dict[str, Tensor]
    total: dict[str, Tensor]
    unsent: dict[str, Tensor]


def codec_of(replicas: Any) -> AbstractCodec:
    if isinstance(replicas, DataParallel):
        return replicas.codec
    found: AbstractCodec
    found = replicas._session.codec if isinstance(replicas, ServedReplicas) else replicas.scheme._codec
    return found


def descend(plan: str, num_steps: int = 4) -> list[Course]:
    """Steps of SGD along gradients that are drawn, on every rank of a plan."""

    def work(group: AbstractGroup, replicas: AbstractReplicas) -> Course:
        parameters, optimizer = make_parameters(), Optimizer(SGD(), lr=LR)
        replicas.join(State(parameters, {}, torch.zeros(0)))
        owned, step, rank = replicas.placement.owned(parameters), 0, replicas.mesh.replica
        state, total = optimizer.init(owned), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        while (step := replicas.next_step(step)) < num_steps:
            add = replicas.begin(1 / replicas.mesh.num_replicas)
            for name, gradient in reversed(gradients_of(rank, step).items()):
                total[name] += gradient
                add(name, gradient.clone())
            _, state = replicas.finish(0.0, Update(optimizer, owned, state, LR, None, replicas.placement.norm))
            step += 1
        replicas.sum(torch.zeros(1))
        kept = codec_of(replicas).memory()
        unsent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for name, shape in SHAPES.items():
            if f"residual/{name}" in kept:
                unsent[name] = kept[f"residual/{name}"].tensor.clone().view(shape)
        return Course({name: p.detach().clone() for name, p in parameters.items()}, total, unsent)

    spec = RunSpec(optimizer=Optimizer(SGD(), lr=LR))
    return list(run_plan(plan, work, spec=spec).results[: parse_plan(plan).num_ranks])


def check_nothing_is_lost(courses: Sequence[Course], unsent_counts: float) -> None:
    """The weights are where all gradients lead, but for what waits; all ranks have the same."""
    assert any(course.unsent[name].any() for course in courses for name in SHAPES)
    for name in SHAPES:
        mean = sum(course.total[name].double() for course in courses) / len(courses)
        waits = sum(course.unsent[name].double() for course in courses)
        expected = -LR * mean + unsent_counts * waits
        for course in courses:
            assert torch.equal(course.weights[name], courses[0].weights[name])
            torch.testing.assert_close(course.weights[name].double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("codec", IN_GROUPS)
@pytest.mark.parametrize("plan", ["data=3 topology=direct", "data=2"])
def test_synchronous_ranks_lose_nothing(plan: str, codec: str) -> None:
    check_nothing_is_lost(descend(f"{plan} compress={codec}"), LR)


@pytest.mark.parametrize("codec", [codec for codec in IN_GROUPS if "powersgd" not in codec])
@pytest.mark.parametrize("plan", ["shard=2", "shard=3", "data=2 shard=2"])
def test_shards_of_the_state_lose_nothing(plan: str, codec: str) -> None:
    check_nothing_is_lost(descend(f"{plan} compress={codec}"), LR)


@pytest.mark.parametrize("codec", WITH_MEMORY)
@pytest.mark.parametrize("plan", ["data=3 topology=server(2)", "data=2 topology=server"])
def test_servers_are_sent_everything_in_the_end(plan: str, codec: str) -> None:
    """A push counts with its share, and so does what is left of it."""
    check_nothing_is_lost(descend(f"{plan} compress={codec}"), LR / parse_plan(plan).num_replicas)


@pytest.mark.parametrize("codec", IN_GROUPS)
def test_local_ranks_lose_nothing(codec: str) -> None:
    """What waits is a difference of weights, which lead against gradients."""
    check_nothing_is_lost(descend(f"data=3 consistency=local(2) topology=direct compress={codec}"), -1.0)


def test_local_ranks_that_keep_their_own_way_too_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what was not sent is in the codec's memory, and in the weights as well."""
    right = LocalAveraging.after_update

    def wrong(scheme: Any, state: Any) -> Any:
        before = {name: p.detach().clone() for name, p in scheme._parameters.items()}
        state = right(scheme, state)
        with torch.no_grad():
            for name, parameter in scheme._parameters.items():
                parameter.lerp_(before[name], 0.1)
        return state

    monkeypatch.setattr(LocalAveraging, "after_update", wrong)
    with pytest.raises(AssertionError):
        check_nothing_is_lost(descend("data=3 consistency=local(2) topology=direct compress=topk(0.1)"), -1.0)


def reference_of_shards(codec: str, size: int, num_steps: int) -> dict[str, Tensor]:
    """Every rank's parts encoded and decoded by themselves, and added in the order of ranks."""
    parameters = make_parameters()
    codecs = [make_codec(parse_plan(f"compress={codec}").compress, rank=rank) for rank in range(size)]
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(num_steps):
        for bucket in plan_buckets(parameters):
            cut, sums = cut_bucket(bucket, parameters, size), []
            messages = [
                bucket.pack(gradients_of(rank, step), torch.empty(bucket.num_elements)).split(cut.sizes)
                for rank in range(size)
            ]
            for owner, part in enumerate(cut.parts):
                pairs = zip(codecs, messages, strict=True)
                sent = [one.encode(part, message[owner], scale=1 / size) for one, message in pairs]
                decoded = [codecs[owner].decode(part, message).view(-1) for message in sent]
                total = decoded[0].clone()
                for more in decoded[1:]:
                    total.add_(more)
                sums.append(total)
            for name, total in bucket.unpack(torch.cat(sums)).items():
                weights[name] -= LR * total
    return weights


@pytest.mark.parametrize("codec", ["qsgd(4)", "terngrad", "onebit", "topk(0.1)", "threshold(0.5)", "randomk(0.2)"])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_shards_have_the_bits_of_their_definition(codec: str, size: int) -> None:
    expected, found = reference_of_shards(codec, size, 3), descend(f"shard={size} compress={codec}", 3)
    for course in found:
        assert all(torch.equal(course.weights[name], tensor) for name, tensor in expected.items())


def test_an_owner_that_keeps_exact_values_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reduction.scatter_encoded

    def wrong(codec: AbstractCodec, part: Any, sent: Any, group: AbstractGroup, out: Tensor) -> Any:
        own = out.clone() / group.size  # the message lies there, as it was before it was encoded
        total = yield from right(codec, part, sent, group, out)
        return total.add_(own - codec.decode(part, sent[group.rank]).view(-1))

    monkeypatch.setattr(reducers_module, "scatter_encoded", wrong)
    with pytest.raises(AssertionError):
        check_nothing_is_lost(descend("shard=2 compress=topk(0.1)"), LR)


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "data=3 topology=server(2)"])
def test_a_second_training_begins_with_an_empty_memory(plan: str) -> None:
    """Regression: what one seed had not sent was sent by the next."""

    def work(group: AbstractGroup, replicas: AbstractReplicas) -> bool:
        memory = []
        for _ in range(2):
            replicas.join(State(make_parameters(), {}, torch.zeros(0)))
            memory.append(dict(codec_of(replicas).memory()))
            codec_of(replicas).remember({"residual/b1": torch.ones(40)})
        replicas.sum(torch.zeros(1))
        return memory == [{}, {}]

    spec = RunSpec(optimizer=Optimizer(SGD(), lr=LR), seeds=(0, 1))
    assert all(run_plan(f"{plan} compress=topk", work, spec=spec).results[:2])


EVERYTHING = [
    "data=2",
    "shard=2 shard_level=2",
    "shard=2 shard_level=3",
    "data=2 topology=server(2)",
    "data=2 tensor=2",
    "data=2 pipeline=2",
]


@pytest.mark.parametrize("plan", EVERYTHING)
def test_all_that_is_selected_is_the_gradient(plan: str, tmp_path: Path) -> None:
    """A top-k of everything has the bits of no codec at all."""
    hashes = []
    for codec in ("none", "topk(1)"):
        case = case_of(small_mlp(), f"{plan} compress={codec}", 3)
        with use_determinism():
            ranks = run_case(case, partial(hash_trained, case), tmp_path / codec)
        hashes.append(ranks)
    assert hashes[0] == hashes[1]


def hash_trained(case: Any, replicas: AbstractReplicas) -> str:
    state, _ = train_to_the_end(case, replicas)
    return hash_tensors(state.model.parameters)


@pytest.mark.parametrize("codec", ["topk(0.05)", "qsgd(4)", "onebit"])
def test_ranks_that_split_layers_keep_the_others_alike(codec: str, tmp_path: Path) -> None:
    """Regression: a rank's part of one layer decided how much was sent of a bias that both ranks have."""
    case = case_of(small_mlp(), f"data=2 tensor=2 compress={codec}", 3)

    def work(replicas: AbstractReplicas) -> dict[str, Tensor]:
        state, _ = train_to_the_end(case, replicas)
        whole = [n for n in state.model.parameters if replicas.placement.cut_of(f"parameter/{n}") is None]
        return {name: state.model.parameters[name].detach().clone() for name in whole}

    with use_determinism():
        first, *others = run_case(case, work, tmp_path / "run")
    assert first
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


SERVED = [
    "data=3 consistency=async topology=server(2) compress=topk(0.1)",
    "data=3 consistency=async topology=server compress=qsgd(4)",
    "data=3 consistency=async(push=difference) topology=server(2) compress=onebit",
    "data=2 consistency=async(parts=2) topology=server(2) compress=topk(0.1)",
    "data=4 consistency=async topology=server(2,inner=2) compress=topk(0.1)",
    "data=3 consistency=stale(1) topology=server(2) compress=threshold(0.01)",
    "data=3 consistency=backup(1) topology=server compress=terngrad",
]


@pytest.mark.parametrize("plan", SERVED)
def test_a_replay_has_the_same_bits(plan: str, tmp_path: Path) -> None:
    """What is not sent hangs on the order of a rank's own steps alone."""
    case = case_of(small_mlp(), plan, 6)

    def work(replicas: AbstractReplicas) -> str:
        state, _ = train_to_the_end(case, replicas)
        assert isinstance(replicas, ServedReplicas)
        weights = replicas.fetch_weights()
        return hash_tensors(state.model.parameters if weights is None else weights)

    with use_determinism():
        first = run_case(case, work, tmp_path / "first")
        again = run_case(case, work, tmp_path / "again", tmp_path / "first")
    assert first == again and len(set(first)) == 1
