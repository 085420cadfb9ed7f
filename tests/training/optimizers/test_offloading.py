"""Optimizer state on disk: the same bits, in memory that a file backs and that leaves nothing behind."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.errors import StorageError
from weft.training.component import Component, build
from weft.training.optimizers import OPTIMIZERS, AbstractOptimizer, OptimizerState
from weft.training.optimizers.offloading import OffloadedOptimizer, is_on_disk, map_on_disk, move_to_disk


def trained(optimizer: AbstractOptimizer, num_steps: int = 3) -> tuple[Mapping[str, Tensor], OptimizerState]:
    weights = {"w": torch.linspace(-1, 1, 3000).view(60, 50).clone(), "b": torch.ones(3)}
    state = optimizer.init(weights)
    for step in range(num_steps):
        gradients = {name: (weight * (step + 1)).cos() for name, weight in weights.items()}
        state = optimizer.update({**gradients, "b": None if step == 1 else gradients["b"]}, weights, state, 0.01)
    return weights, state


COMPONENTS = [Component("adam"), Component("lamb"), Component("rmsprop"), Component("torch", name="AdamW")]


@pytest.mark.parametrize("component", COMPONENTS, ids=str)
def test_the_bits_are_those_of_state_in_memory(component: Component) -> None:
    expected, state = trained(build(component, OPTIMIZERS, "optimizer"))
    found, offloaded = trained(OffloadedOptimizer(build(component, OPTIMIZERS, "optimizer")))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    for name, slots in state.slots.items():
        assert all(torch.equal(offloaded.slots[name][key], slot) for key, slot in slots.items())
    assert all(is_on_disk(slot) for slot in offloaded.slots["w"].values() if slot.dim())
    assert offloaded.shared.step == state.shared.step


def test_slots_stay_where_they_are_from_step_to_step() -> None:
    optimizer = OffloadedOptimizer(build(Component("adam"), OPTIMIZERS, "optimizer"))
    weights = {"w": torch.ones(2048)}
    state = optimizer.init(weights)
    before = state.slots["w"]["first_moment"].data_ptr()
    after = optimizer.update({"w": torch.ones(2048)}, weights, state, 0.1)
    assert after.slots["w"]["first_moment"].data_ptr() == before


def test_memory_is_a_file_that_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    tensor = move_to_disk(torch.arange(5000.0))
    assert torch.equal(tensor, torch.arange(5000.0)) and list(tmp_path.iterdir()) == []
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert mapped and all("(deleted)" in line for line in mapped)


def test_a_full_disk_is_told_before_a_page_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(StorageError, match=r"no room for optimizer state .*bytes: 4000.*TMPDIR"):
        map_on_disk(torch.Size([1000]), torch.float32)


def test_small_tensors_stay_in_memory() -> None:
    assert not is_on_disk(move_to_disk(torch.ones(3)))
