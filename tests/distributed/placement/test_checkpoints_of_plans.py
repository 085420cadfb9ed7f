"""Checkpoints from plan to plan: each loads what another has trained and saved, saves it to the same bits, trains on.

one rank -> tensor=2 -> pipeline=2 -> ...      step, save | load, save again: the same | step, save | load, ...
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.distributed.placement.expert.cases import small_moe
from tests.distributed.placement.pipeline.cases import small_gpt
from tests.distributed.placement.proofs import small_net
from tests.distributed.virtual_plan import run_plan
from tests.proving.test_lockstep import splits_of
from weft.distributed.group import AbstractGroup
from weft.distributed.realise import RunSpec
from weft.specs import parse_plan
from weft.training.build import build_task
from weft.training.checkpoint import Cut, Snapshot, latest_checkpoint, read_checkpoint, write_checkpoint
from weft.training.checkpoint.reading import ChunkReader
from weft.training.loop import take_step
from weft.training.recipe import Recipe
from weft.training.replicas import AbstractReplicas
from weft.training.snapshot import ranks_of, readers_of, restore, take_snapshot

GPT = (
    "data=1",
    "tensor=2",
    "pipeline=2 schedule=gpipe(2)",
    "shard=2 shard_level=3",
    "pipeline=2 tensor=1:2 schedule=1f1b(2)",
    "data=2",
    "shard=2 tensor=2",
    "shard=2 shard_level=2",
    "pipeline=2 schedule=interleaved(2,chunks=2)",
    "linear=2",
    "pipeline=2 linear=2 schedule=1f1b(2) cut=time(stages=measured)",
    "shard=2 pipeline=2 schedule=gpipe(2)",
    "data=1",
)
EXPERTS = ("expert=2", "shard=2 shard_level=3", "expert=2 tensor=2", "data=2 expert=2", "data=1")
STATISTICS = (
    "tensor=2",
    "data=2",
    "pipeline=2 schedule=gpipe(2)",
    "pipeline=2 schedule=gpipe(2) cut=parameters",
    "linear=2",
    "pipeline=2 linear=2 schedule=gpipe(2)",
    "shard=2 shard_level=3",
    "data=1",
)
CASES = {
    "gpt": (small_gpt(data__sequence_length=12), GPT),
    "experts": (small_moe(optimizer="adam", optimizer__lr=0.01, batch_size=8), EXPERTS),
    "statistics": (small_net("resnet", model__depth=8, batch_size=8, optimizer="adam", optimizer__lr=0.01), STATISTICS),
}


def carry_on(recipe: Recipe, plan: str, loaded: Path | None, folder: Path) -> Path:
    """Load, save at once in `folder/again`; take a step, save in `folder`."""
    chosen = recipe.with_setting("plan", plan)

    def program(_group: AbstractGroup, replicas: AbstractReplicas) -> None:
        task, state = build_task(chosen, splits_of(recipe.fixed.data), 0, replicas)
        replicas.join(state.model)
        if loaded is not None:
            snapshot = latest_checkpoint(loaded, pytest.fail, readers_of(replicas, state.model))
            assert snapshot is not None
            state = restore(state, snapshot)
            write_checkpoint(folder / "again", take_snapshot(state, {}, replicas), ranks_of(replicas))
        state, _ = take_step(task, state)
        write_checkpoint(folder, take_snapshot(state, {}, replicas), ranks_of(replicas))

    run_plan(parse_plan(plan), program, spec=RunSpec.of(chosen, (0,)))
    return folder


def whole_in(folder: Path) -> Snapshot:
    (path,) = folder.glob("step-*")
    return read_checkpoint(path)


def differences(one: Snapshot, other: Snapshot) -> list[str]:
    assert one.entries.keys() == other.entries.keys()
    return [
        name
        for name, entry in one.entries.items()
        if name != "random" and not torch.equal(entry.tensor, other.entries[name].tensor)
    ]


@pytest.mark.parametrize("case", CASES)
def test_each_plan_goes_on_from_the_one_before(case: str, tmp_path: Path) -> None:
    recipe, plans = CASES[case]
    folder = carry_on(recipe, plans[0], None, tmp_path / "0")
    for number, (_, plan) in enumerate(pairwise(plans), start=1):
        before = whole_in(folder)
        folder = carry_on(recipe, plan, folder, tmp_path / str(number))
        assert differences(before, whole_in(folder / "again")) == [], plan
        assert differences(before, whole_in(folder)), "a step changes it"


def test_parts_that_lie_elsewhere_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes the rows of a split layer in another order."""
    recipe, _ = CASES["gpt"]
    carry_on(recipe, "data=1", None, tmp_path / "0")
    real = ChunkReader.read

    def upside_down(self: ChunkReader, name: str, number: int, cut: Cut | None = None) -> torch.Tensor:
        found = real(self, name, number, cut)
        return found.flip(0) if cut is not None and found.dim() == 2 else found

    monkeypatch.setattr(ChunkReader, "read", upside_down)
    carry_on(recipe, "tensor=2", tmp_path / "0", tmp_path / "1")
    monkeypatch.undo()
    assert differences(whole_in(tmp_path / "0"), whole_in(tmp_path / "1" / "again"))
