"""Ranks against the equations of their consistency: sound ones pass, and planted faults are caught."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.consistency.cases import make_replicas, prove, small_mlp
from tests.proving.test_lockstep import Faulty, FlippedBit, case_of
from weft.distributed.consistency import Gossip, LocalAveraging, RelaxedReplicas
from weft.distributed.consistency.elastic import ElasticAveraging
from weft.distributed.consistency.parcel import Parcel
from weft.distributed.group import AbstractGroup
from weft.graph import GradientSink
from weft.proving.lockstep import Lockstep, compare_ranks, first_step_of
from weft.proving.proof import Proof, Trace
from weft.specs import parse_plan
from weft.training.optimizers import OptimizerState
from weft.training.replicas import AbstractReplicas, Update

RECIPES = {
    "momentum, ragged": small_mlp(),
    "adam": small_mlp(optimizer="adam", optimizer__lr=0.002),
    "clipped, accumulated, dropout": small_mlp(clip_norm=0.5, accumulate=3, model__dropout=0.3),
}

LOCAL = ["local(2)", "local(3,state=mean)", "local(2,outer=nesterov)", "local(2,after=4)", "local(1,after=1)"]


@pytest.mark.parametrize("consistency", LOCAL)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_local_steps_follow_their_equations(recipe: Any, consistency: str) -> None:
    proof = prove(recipe, 3, consistency)
    assert proof.passed, proof.finding
    assert "3 ranks followed the equations" in proof.finding
    assert proof.is_bitwise or "nesterov" in consistency, proof.finding


@pytest.mark.parametrize("consistency", ["gossip(ring)", "gossip(exponential,mix=after)"])
@pytest.mark.parametrize("size", [2, 5])
def test_gossip_follows_its_equations(consistency: str, size: int) -> None:
    proof = prove(small_mlp(), size, consistency)
    assert proof.passed, proof.finding


@pytest.mark.parametrize("consistency", ["elastic(1)", "elastic(2)", "elastic(4,beta=0.5)"])
def test_elastic_averaging_follows_its_equations(consistency: str) -> None:
    proof = prove(small_mlp(optimizer="adam", optimizer__lr=0.002), 3, consistency)
    assert proof.passed, proof.finding


def test_ranks_without_samples_follow_too() -> None:
    proof = prove(small_mlp(batch_size=6), 5, "local(2)")  # the last batch has 3 samples
    assert proof.passed and proof.is_bitwise, proof.finding


def test_enough_steps_are_traced_to_see_two_meetings() -> None:
    def of(text: str) -> tuple[int, int]:
        plan = parse_plan(f"data=2 consistency={text}")
        return Lockstep().steps_needed(plan, 5), first_step_of(plan)

    assert of("local(8)") == (17, 0)
    assert of("local(8,after=100)") == (18, 99)
    assert of("local(8,after=1)") == (18, 0)
    assert of("gossip") == (5, 0)


# ---- planted faults


def relaxed(group: AbstractGroup, consistency: str) -> RelaxedReplicas:
    replicas = make_replicas(consistency)(group)
    assert isinstance(replicas, RelaxedReplicas)
    return replicas


class GradientsMixed(Faulty):
    """Deep500's neighbours: gradients are mixed, weights never."""

    def __init__(self, inner: AbstractReplicas, group: AbstractGroup) -> None:
        super().__init__(inner)
        self.group = group

    def begin(self, weight: float) -> GradientSink:
        self.gradients: dict[str, Tensor | None] = {}
        return self.gradients.__setitem__

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        size = self.mesh.num_replicas
        graph = tuple(tuple(sorted({(r - 1) % size, (r + 1) % size})) for r in range(size))
        weights = tuple((1 / (1 + len(row)),) * (1 + len(row)) for row in graph)
        for gradient in self.gradients.values():
            assert gradient is not None
            self.group.neighbour_all_reduce(gradient, graph, weights)
        return loss, update.apply(self.gradients)


class LostMomentum(Faulty):
    """The slots are gone after each meeting, as where a checkpoint or an average forgets them."""

    num_finished = 0

    def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
        total, state = self.inner.finish(loss, update)
        self.num_finished += 1
        if self.num_finished % 2:
            return total, state
        fresh = update.optimizer.init(update.parameters)
        return total, OptimizerState(state.shared, fresh.slots)


def test_neighbours_that_mix_gradients_are_caught() -> None:
    def make(group: AbstractGroup) -> AbstractReplicas:
        return GradientsMixed(relaxed(group, "gossip(ring)"), group)

    proof = prove(small_mlp(), 4, "gossip(ring)", make)
    assert not proof.passed and proof.finding.startswith("after step 1, "), proof.finding


def test_lost_momentum_is_caught() -> None:
    proof = prove(small_mlp(), 2, "local(2)", lambda group: LostMomentum(relaxed(group, "local(2)")))
    assert not proof.passed and proof.finding.startswith("after step 2, "), proof.finding


@pytest.mark.parametrize("consistency", ["local(2)", "gossip(ring)"])
def test_a_wrong_averaging_weight_is_caught(consistency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Parcel.pack

    def pack(self: Parcel, tensors: Mapping[str, Tensor], factor: float = 1.0) -> None:
        sound(self, tensors, 1.01 * factor)

    monkeypatch.setattr(Parcel, "pack", pack)
    assert not prove(small_mlp(), 2, consistency).passed


def test_a_rank_that_is_not_weighed_by_its_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right as long as shares are equal: only the ragged last batch shows it."""
    sound = LocalAveraging.begin
    monkeypatch.setattr(LocalAveraging, "begin", lambda self, step, weight: sound(self, step, 1 / 4))
    assert not prove(small_mlp(batch_size=65), 4, "local(2)").passed


def test_an_average_that_leaves_the_state_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalAveraging, "_average", lambda self, state: state)
    proof = prove(small_mlp(), 2, "local(2,state=mean)")
    assert not proof.passed and "(velocity)" in proof.finding, proof.finding


def test_an_outer_optimizer_without_its_velocity_is_caught() -> None:
    def make(group: AbstractGroup) -> AbstractReplicas:
        replicas = relaxed(group, "local(2,outer=nesterov)")
        scheme: Any = replicas.scheme
        sound = scheme._outer.update

        def forgetful(mean: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            scheme._outer.state = scheme._outer._optimizer.init(scheme._outer.anchor)
            result: Mapping[str, Tensor] = sound(mean)
            return result

        scheme._outer.update = forgetful
        return replicas

    proof = prove(small_mlp(), 2, "local(2,outer=nesterov)", make)
    assert not proof.passed and proof.finding.startswith("after step 4, "), proof.finding


def test_a_centre_that_does_not_move_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = ElasticAveraging._receive_visitors

    def still(self: ElasticAveraging) -> None:
        before = [message.clone() for message in self._centre.messages]
        sound(self)
        for message, kept in zip(self._centre.messages, before, strict=True):
            message.copy_(kept)

    monkeypatch.setattr(ElasticAveraging, "_receive_visitors", still)
    assert not prove(small_mlp(), 3, "elastic(2)").passed


def test_a_gradient_at_mixed_weights_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's gradient is that of the weights before they are mixed."""
    send, take = Gossip._send, Gossip._take

    def early(self: Gossip, step: int, weight: float) -> None:
        send(self)
        take(self)

    monkeypatch.setattr(Gossip, "begin", early)
    monkeypatch.setattr(Gossip, "before_update", lambda self: None)
    assert not prove(small_mlp(), 4, "gossip(ring)").passed


def test_replicas_that_should_be_equal_must_be_so_to_the_last_bit() -> None:
    class Flipped(FlippedBit):
        def finish(self, loss: float, update: Update) -> tuple[float, OptimizerState]:
            self.num_finished += self.num_finished == 0
            return super().finish(loss, update)

    proof = prove(small_mlp(), 2, "local(2)", lambda group: Flipped(relaxed(group, "local(2)")))
    assert proof.finding.startswith("replicas differ after step 2"), proof.finding


def compare(ranks: list[Trace], references: list[Trace]) -> Proof:
    return compare_ranks(ranks, references, case_of(small_mlp(), "data=2 consistency=local(2)", 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.1])
def test_a_difference_is_told_with_its_rank_and_place(bad: float) -> None:
    def trace_of(value: float, expected: float = 2.0) -> Trace:
        return [{"w": torch.tensor([expected, value])}]

    proof = compare([trace_of(1.0), trace_of(bad, 1.0)], [trace_of(1.0), trace_of(1.0, 1.0)])
    assert not proof.passed and proof.finding.startswith("after step 1, w[1] of rank 1 is off by ")


def test_traces_of_another_shape_are_no_proof() -> None:
    one = [{"w": torch.ones(1)}]
    assert not compare([one, one * 2], [one, one]).passed
