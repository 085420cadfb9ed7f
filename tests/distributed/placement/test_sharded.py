"""Sharded optimizer state: ranks that update pieces end where one rank ends, with a share of the memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.placement.cases import RankOrderGroup
from tests.proving.test_lockstep import STEPS, case_of, small_mlp
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.placement import MeshGroups, ShardedState
from weft.distributed.placement.bucket_cut import cut_bucket
from weft.distributed.placement.buckets import plan_buckets
from weft.distributed.placement.cut import ALIGNMENT, cut_evenly
from weft.distributed.placement.reducers import ScatterReducer
from weft.distributed.virtual import run_virtual
from weft.errors import RecipeError
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.lockstep import whole_of as copy_of_whole
from weft.proving.method import Case
from weft.proving.proof import Proof
from weft.training.build import build_task, check_recipe
from weft.training.checkpoint import latest_checkpoint, write_checkpoint
from weft.training.loop import Task, TrainingState, take_step
from weft.training.optimizers import OPTIMIZERS, Momentum, Optimizer, OptimizerState
from weft.training.optimizers.torch_optimizer import ELEMENT_WISE
from weft.training.recipe import Recipe
from weft.training.replicas import SoloReplicas
from weft.training.snapshot import ranks_of, restore, take_snapshot

Make = Callable[[AbstractGroup], AbstractGroup]


def prove(recipe: Recipe, plan: str, wrap: Make = RankOrderGroup) -> Proof:
    case = case_of(recipe, plan, STEPS)
    mesh = case.plan.mesh

    def trace(group: AbstractGroup) -> object:
        return trace_ranks(case, replicas_in(MeshGroups(wrap(group), mesh(group.rank)), case.plan))

    traces = run_virtual(trace, case.plan.num_ranks).results
    return compare_ranks(list(traces), trace_references(case), case)


# ---- every element-wise optimizer

OF_TORCH = sorted(kind.__name__ for kind in ELEMENT_WISE)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"torch"}))
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_pieces_have_the_bits_of_one_rank(name: str, size: int) -> None:
    proof = prove(small_mlp(optimizer=name, optimizer__lr=0.01), f"shard={size}")
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.parametrize("name", OF_TORCH)
def test_so_have_those_of_torch(name: str) -> None:
    proof = prove(small_mlp(optimizer="torch", optimizer__name=name, optimizer__lr=0.01), "shard=2")
    assert proof.passed and proof.is_bitwise, proof.finding


def test_groups_of_shards_agree_up_to_the_order_of_sums() -> None:
    proof = prove(small_mlp(optimizer="adam", optimizer__lr=0.01), "data=2 shard=2")
    assert proof.passed and not proof.is_bitwise, proof.finding
    assert proof.largest_error < 1e-6


def test_clipping_is_by_the_norm_over_all_pieces() -> None:
    proof = prove(small_mlp(clip_norm=0.05), "shard=3")
    assert proof.passed, proof.finding
    assert proof.largest_error < 1e-6


def test_half_precision_travels_in_parts() -> None:
    proof = prove(small_mlp(), "shard=2 compress=bf16")
    assert proof.passed and proof.is_bitwise, proof.finding


def test_a_rule_that_looks_ahead_gets_whole_points(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(Momentum):  # type: ignore[misc]  # final, but for a test
        def prepare_param(self, parameter: Tensor, slots: Mapping[str, Tensor], shared: object) -> Tensor:
            return parameter - 0.01 * slots["velocity"]

    monkeypatch.setitem(OPTIMIZERS, "momentum", lambda *, lr: Optimizer(Ahead(0.9), lr=lr))
    proof = prove(small_mlp(), "shard=2")
    assert proof.passed and proof.is_bitwise, proof.finding


# ---- planted faults


def test_pieces_that_are_not_gathered_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedState, "spread", lambda self, tensors: 0)
    assert not prove(small_mlp(), "shard=2").passed


def test_a_norm_of_one_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedState, "norm", lambda self, norms: torch.stack(list(norms.values())).norm())
    assert not prove(small_mlp(clip_norm=0.05), "shard=2").passed


def test_groups_that_do_not_add_up_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shard groups, each of which goes on with the gradients of its own half of the batch."""
    real = ScatterReducer.__init__
    monkeypatch.setattr(
        ScatterReducer,
        "__init__",
        lambda self, shard, others_of, *rest, **options: real(self, shard, lambda name: None, *rest, **options),
    )
    assert not prove(small_mlp(), "data=2 shard=2").passed


# ---- memory, pieces, refusals


@pytest.mark.parametrize("size", [2, 4])
def test_live_bytes_of_the_state_are_a_share(size: int) -> None:
    """The bar is within 10% of 1/N on every rank, after a step."""
    case = case_of(small_mlp(optimizer="adam", model__hidden=64), f"shard={size}", 1)

    def live_bytes(group: AbstractGroup) -> int:
        replicas = replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        state, _ = take_step(task, state)
        return state.optimizer.num_bytes

    _, state = build_task(case.recipe, case.splits, 0)
    whole = state.optimizer.num_bytes
    for found in run_virtual(live_bytes, size).results:
        assert found == pytest.approx(whole / size, rel=0.1)


def test_a_bucket_is_cut_at_aligned_places_into_all_of_it() -> None:
    parameters = {"w": torch.zeros(1000, 3, requires_grad=True), "b": torch.zeros(70, requires_grad=True)}
    (bucket,) = plan_buckets(parameters)
    cut = cut_bucket(bucket, parameters, 4)
    pieces = [piece for part in cut.parts for piece in part.pieces]
    assert sum(cut.sizes) == bucket.num_elements
    assert [(p.name, p.begin) for p in pieces if p.begin == 0] == [("b", 0), ("w", 0)]
    assert all(piece.begin % ALIGNMENT == 0 for piece in pieces)
    assert all(before.end == after.begin for before, after in pairwise(pieces[1:]))


def test_an_optimizer_that_needs_whole_tensors_is_refused() -> None:
    recipe = small_mlp(optimizer="torch", optimizer__name="Adafactor").with_setting("plan", "shard=2")
    with pytest.raises(RecipeError, match=r"needs whole tensors.*Adafactor.*element-wise"):
        check_recipe(recipe)
    check_recipe(replace(recipe.with_setting("plan", "data=2")))


def test_slots_that_are_views_count_as_what_they_keep_alive() -> None:
    whole = torch.zeros(100)
    shared = Optimizer(Momentum(), lr=0.1).init({}).shared
    assert OptimizerState(shared, {"w": {"a": whole[:10], "b": whole[10:20]}}).num_bytes == 400


# ---- checkpoints, from any mesh to any mesh

PLANS = ("data=1", "data=2", "shard=2", "data=2 shard=2", "shard=3")


def whole_of(case: Case, work: Callable[[Task, TrainingState], TrainingState]) -> list[dict[str, Tensor]]:
    """Parameters and the whole optimizer state of every rank, after some work on a fresh state."""

    def program(group: AbstractGroup) -> dict[str, Tensor]:
        solo = case.plan.num_ranks == 1
        replicas = SoloReplicas() if solo else replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        state = work(task, state)
        return copy_of_whole(state.model.parameters, state.optimizer, replicas)

    return list(run_virtual(program, case.plan.num_ranks).results)


@pytest.mark.parametrize("saved", PLANS)
@pytest.mark.parametrize("name", ["adam", "NAdam"])
def test_a_checkpoint_of_any_mesh_loads_under_any_other(saved: str, name: str, tmp_path: Path) -> None:
    own = {"optimizer": "adam"} if name == "adam" else {"optimizer": "torch", "optimizer__name": name}
    recipe = small_mlp(optimizer__lr=0.01, **own) if name == "adam" else small_mlp(**own)

    def train_and_save(task: Task, state: TrainingState) -> TrainingState:
        for _ in range(2):
            state, _ = take_step(task, state)
        write_checkpoint(tmp_path, take_snapshot(state, {}, task.replicas), ranks_of(task.replicas))
        return state

    def load(task: Task, state: TrainingState) -> TrainingState:
        snapshot = latest_checkpoint(tmp_path, pytest.fail, ranks_of(task.replicas))
        assert snapshot is not None
        return restore(state, snapshot)

    expected = whole_of(case_of(recipe, saved, 1), train_and_save)[0]
    for plan in PLANS:
        for found in whole_of(case_of(recipe, plan, 1), load):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), plan


def test_a_sharded_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """With the steps after the checkpoint taken by the same mesh, and once by a rank alone."""
    recipe = small_mlp(optimizer="adam", optimizer__lr=0.01)
    case = case_of(recipe, "shard=2", 1)

    def go_on(task: Task, state: TrainingState) -> TrainingState:
        for step in range(4):
            if step == 2:
                write_checkpoint(tmp_path, take_snapshot(state, {}, task.replicas), ranks_of(task.replicas))
            state, _ = take_step(task, state)
        return state

    def resume(task: Task, state: TrainingState) -> TrainingState:
        snapshot = latest_checkpoint(tmp_path, pytest.fail, ranks_of(task.replicas))
        assert snapshot is not None
        state = restore(state, snapshot)
        task.replicas.remember(snapshot.step, snapshot.entries)
        for _ in range(2):
            state, _ = take_step(task, state)
        return state

    expected = whole_of(case, go_on)[0]
    for found in whole_of(case, resume):
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    (alone,) = whole_of(case_of(recipe, "data=1", 1), resume)
    assert all(torch.allclose(alone[key], tensor, atol=1e-5) for key, tensor in expected.items())


# ---- found by a reader


def test_a_rule_that_looks_ahead_waits_for_ranks_that_own_nothing() -> None:
    # Regression: a rank without a piece found nothing to gather, and the others waited for it.
    class Ahead(Momentum):  # type: ignore[misc]
        def prepare_param(self, parameter: Tensor, slots: Mapping[str, Tensor], shared: object) -> Tensor:
            return parameter - 0.01 * slots["velocity"]

    def program(group: AbstractGroup) -> list[float]:
        placement, optimizer = ShardedState(group), Optimizer(Ahead(0.9), lr=0.1)
        parameters = {"w": torch.ones(10, requires_grad=True)}
        state = optimizer.init(placement.owned(parameters))
        return placement.prepare(optimizer, parameters, state)["w"].tolist()

    assert run_virtual(program, 3).results == ([1.0] * 10,) * 3


def test_an_empty_parameter_has_an_owner() -> None:
    pieces = cut_evenly({"none": torch.zeros(0, 3), "w": torch.zeros(5)}, 2)
    assert [piece.name for own in pieces for piece in own] == ["none", "w"]
