"""Gradients and parameters in pieces (shard_level 2 and 3): the results of one rank, with a share of the memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.placement.test_sharded import PLANS, prove, whole_of
from tests.proving.test_lockstep import STEPS, case_of, small_mlp
from weft.distributed.channels.all_reduce import replicas_in
from weft.distributed.group import AbstractGroup
from weft.distributed.group.group import DoneWork
from weft.distributed.placement import DataParallel, MeshGroups, ShardedModel
from weft.distributed.placement.blocks import find_blocks
from weft.distributed.placement.flats import Flat
from weft.distributed.placement.gathering import GatheredBlocks
from weft.distributed.placement.live_bytes import live_bytes
from weft.distributed.placement.shards import AbstractShards
from weft.distributed.virtual import run_virtual
from weft.planning.placement_cost import Held, sharded_memory
from weft.proving.lockstep import compare_ranks, trace_ranks, trace_references
from weft.proving.plan_proof import prove as prove_on_processes
from weft.proving.proof import Trace
from weft.training.build import build_task
from weft.training.checkpoint import latest_checkpoint, write_checkpoint
from weft.training.evaluation import evaluate
from weft.training.loop import Task, TrainingState, take_step
from weft.training.optimizers import OPTIMIZERS, Momentum, Optimizer
from weft.training.replicas import SoloReplicas, Update
from weft.training.snapshot import ranks_of, restore, take_snapshot

LEVELS = ["shard=2 shard_level=2", "shard=2 shard_level=3", "shard=3 shard_level=3"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of a small model is a block."""
    defaults = ShardedModel.__init__.__defaults__
    assert defaults is not None
    monkeypatch.setattr(ShardedModel.__init__, "__defaults__", (*defaults[:-1], 1))


# ---- the results of one rank


@pytest.mark.parametrize("plan", LEVELS)
@pytest.mark.parametrize("name", ["momentum", "adam", "lars", "lamb"])
def test_ranks_with_pieces_have_the_bits_of_one_rank(plan: str, name: str) -> None:
    proof = prove(small_mlp(optimizer=name, optimizer__lr=0.01), plan)
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.parametrize("plan", LEVELS)
@pytest.mark.parametrize("changes", [{"clip_norm": 0.05}, {"accumulate": 2}, {"executor": "graph"}], ids=str)
def test_so_have_clipped_and_accumulated_ones_and_graphs(plan: str, changes: dict[str, Any]) -> None:
    proof = prove(small_mlp(**changes), plan)
    assert proof.passed and proof.largest_error < 1e-6, proof.finding


@pytest.mark.parametrize("plan", ["data=2 shard=2 shard_level=2", "data=2 shard=2 shard_level=3"])
def test_groups_of_shards_agree(plan: str) -> None:
    proof = prove(small_mlp(optimizer="torch", optimizer__name="Adam", optimizer__lr=0.01), plan)
    assert proof.passed, proof.finding


def test_half_precision_travels_in_parts() -> None:
    proof = prove(small_mlp(), "shard=2 shard_level=3 compress=bf16")
    assert proof.passed and proof.is_bitwise, proof.finding


@pytest.mark.parametrize("plan", LEVELS)
def test_a_rule_that_looks_ahead_gets_gradients_there(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(Momentum):  # type: ignore[misc]  # final, but for a test
        def prepare_param(self, parameter: Tensor, slots: Mapping[str, Tensor], shared: object) -> Tensor:
            return parameter - 0.01 * slots["velocity"]

    monkeypatch.setitem(OPTIMIZERS, "momentum", lambda *, lr: Optimizer(Ahead(0.9), lr=lr))
    proof = prove(small_mlp(), plan)
    assert proof.passed and proof.is_bitwise, proof.finding


def test_more_ranks_than_samples_in_a_batch_take_part_all_the_same() -> None:
    """The last batch of an epoch has one sample: ranks without one compute with none."""
    proof = prove(small_mlp(batch_size=4), "shard=4 shard_level=3")
    assert proof.passed, proof.finding


@pytest.mark.parametrize("plan", LEVELS)
def test_evaluation_is_that_of_one_rank(plan: str) -> None:
    case = case_of(small_mlp(), plan, 1)

    def program(group: AbstractGroup | None) -> dict[str, float]:
        mesh = case.plan.mesh
        replicas = replicas_in(MeshGroups(group, mesh(group.rank)), case.plan) if group else SoloReplicas()
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        return evaluate(task.executor, state.model, case.splits.validation, ("accuracy",), replicas)

    expected = program(None)
    assert run_virtual(program, case.plan.num_ranks).results == (expected,) * case.plan.num_ranks


PRODUCTS = ["shard=2 tensor=2 shard_level=3", "shard=2 pipeline=2 shard_level=2", "shard=2 linear=2 shard_level=3"]


@pytest.mark.parametrize("plan", ["shard=2 tensor=2", *PRODUCTS])
@pytest.mark.parametrize("changes", [{"optimizer": "adam", "clip_norm": 0.05}, {"optimizer": "lamb"}], ids=str)
def test_pieces_of_parts_have_the_results_of_one_rank(plan: str, changes: dict[str, Any]) -> None:
    """Norms of gradients, and of layers, are over pieces of all parts."""
    case = case_of(small_mlp(model__hidden=(16, 16), optimizer__lr=0.01, **changes), plan, STEPS)
    mesh = case.plan.mesh

    def trace(group: AbstractGroup) -> Trace:
        return trace_ranks(case, replicas_in(MeshGroups(group, mesh(group.rank)), case.plan))

    traces, references = run_virtual(trace, 4).results, trace_references(case)
    proof = compare_ranks(list(traces), [references[mesh(rank).replica] for rank in range(4)], case)
    assert proof.passed and proof.largest_error < 2e-6, proof.finding


def test_processes_have_the_bits_of_one_rank() -> None:
    proof = prove_on_processes(small_mlp(optimizer="adam", optimizer__lr=0.01), "shard=2 shard_level=3(offload=disk)")
    assert proof.passed and proof.is_bitwise, proof.finding


# ---- planted faults


@pytest.mark.parametrize("plan", LEVELS)
def test_a_gather_that_is_skipped_is_caught(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer: every rank computes with its own piece, and nothing for the others'."""
    real = Flat.ask

    def ask(self: Flat) -> None:
        if "1.weight" not in self.names:
            real(self)
            return
        self.whole, self._work = self.piece.new_zeros(self.cut.bucket.num_elements), DoneWork()
        begin = sum(self.cut.sizes[: self._group.rank])
        self.whole[begin : begin + self.piece.numel()] = self.piece

    monkeypatch.setattr(Flat, "ask", ask)
    assert not prove(small_mlp(), plan).passed


def test_a_block_that_is_let_go_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GatheredBlocks._before

    def before(self: GatheredBlocks, index: int) -> None:
        real(self, index)
        self._let_go(index)

    monkeypatch.setattr(GatheredBlocks, "_before", before)
    with pytest.raises(Exception, match=r"not finite|first bad"):
        assert not prove(small_mlp(), "shard=2 shard_level=3").passed


def test_a_norm_over_one_part_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(self: AbstractShards, norms: Mapping[str, Tensor], num_each: int = 1) -> Mapping[str, Tensor]:
        return norms

    monkeypatch.setattr(AbstractShards, "add_up", alone)
    for recipe in (small_mlp(clip_norm=0.05), small_mlp(optimizer="lamb", optimizer__lr=0.01)):
        assert not prove(recipe, "shard=2 shard_level=3").passed
        assert not prove(recipe, "shard=2").passed


# ---- memory


@contextmanager
def noting(found: list[Held], replicas: DataParallel, state: TrainingState) -> Iterator[None]:
    """Live bytes at every update of this rank."""
    real = DataParallel.finish

    def finish(self: DataParallel, loss: float, update: Update) -> Any:
        sums = self.exchange.wait(loss)[1]
        found.append(live_bytes(self, state.model.parameters, sums, update.state))
        return loss, update.apply(sums)

    replicas.finish = finish.__get__(replicas)  # type: ignore[method-assign]
    yield
    replicas.finish = real.__get__(replicas)  # type: ignore[method-assign]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_live_bytes_are_those_of_the_formula(level: int, size: int) -> None:
    """The bar is 10% on every rank."""
    case = case_of(small_mlp(optimizer="adam", model__hidden=(64,) * 16), f"shard={size} shard_level={level}", 1)

    def program(group: AbstractGroup) -> Held:
        replicas = replicas_in(MeshGroups(group, case.plan.mesh(group.rank)), case.plan)
        assert isinstance(replicas, DataParallel)
        task, state = build_task(case.recipe, case.splits, 0, replicas)
        replicas.join(state.model)
        found: list[Held] = []
        with noting(found, replicas, state):
            take_step(task, state)
        return found[0]

    _, state = build_task(case.recipe, case.splits, 0)
    whole = sum(parameter.nbytes for parameter in state.model.parameters.values())
    expected = sharded_memory(level, size, whole, state.optimizer.num_bytes)
    for held in run_virtual(program, size).results:
        assert held.state == pytest.approx(expected.state, rel=0.1)
        assert held.gradients == pytest.approx(expected.gradients, rel=0.1)
        assert held.total == pytest.approx(expected.total, rel=0.1)


def test_no_more_than_three_blocks_are_whole_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that computes, the next, which is under way, and none of a model's own here."""
    most: dict[int, int] = {}
    real = Flat.ask

    def ask(self: Flat) -> None:
        real(self)
        rank = self._group.rank
        live[rank].add(self)
        most[rank] = max(most.get(rank, 0), sum(flat.is_asked_for for flat in live[rank]))

    live: list[set[Flat]] = [set(), set()]
    monkeypatch.setattr(Flat, "ask", ask)
    assert prove(small_mlp(model__hidden=(16,) * 8), "shard=2 shard_level=3").passed
    assert set(most.values()) == {2}


# ---- checkpoints

OTHERS = ("shard=2 shard_level=3", "data=2 shard=2 shard_level=2", "shard=3 shard_level=3", *PLANS[:3])


@pytest.mark.parametrize("saved", OTHERS)
def test_a_checkpoint_of_any_level_loads_under_any_other(saved: str, tmp_path: Path) -> None:
    recipe = small_mlp(optimizer="adam", optimizer__lr=0.01)

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
    for plan in OTHERS:
        for found in whole_of(case_of(recipe, plan, 1), load):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), plan


# ---- blocks


def test_blocks_are_children_of_containers_and_small_ones_go_together() -> None:
    layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(4)])
    model = nn.ModuleDict(
        {"embed": nn.Embedding(5, 10), "layers": layers, "nested": nn.Sequential(nn.ReLU(), layers[3])}
    )
    own, *blocks = find_blocks(model, least_bytes=800)
    assert own.names == ("embed.weight",)
    assert [len(block.modules) for block in blocks] == [2, 2]
    assert blocks[0].names == ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")


def test_tied_weights_are_of_the_models_own_block() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    own, *blocks = find_blocks(model, least_bytes=1)
    assert own.names == ("0.weight",)
    assert [block.names for block in blocks] == [("0.bias",), ("1.weight", "1.bias"), ("2.bias",)]
