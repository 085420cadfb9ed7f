"""Checkpoints of split linear layers: from any plan to any plan, to the last bit."""

from pathlib import Path

import pytest
import torch

from tests.distributed.placement.test_sharded import whole_of
from tests.proving.test_lockstep import case_of, small_mlp
from weft.training.checkpoint import latest_checkpoint, write_checkpoint
from weft.training.loop import Task, TrainingState, take_step
from weft.training.snapshot import ranks_of, restore, take_snapshot

PLANS = ("data=1", "linear=2", "linear=3", "data=2 linear=2", "shard=2", "tensor=2")


@pytest.mark.parametrize("saved", ["data=1", "linear=3", "data=2 linear=2"])
def test_a_checkpoint_of_any_plan_loads_under_any_other(saved: str, tmp_path: Path) -> None:
    recipe = small_mlp(optimizer="adam", optimizer__lr=0.01, model__hidden="16,10")

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
