"""Ranks in processes of their own write a checkpoint at once; one that is killed on the way leaves the one before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes.checkpoints import SIZE, snapshot_of
from tests.processes.ranks import run_processes
from tests.training.checkpoint.meeting import save_on
from weft.specs import Mesh
from weft.training.checkpoint import Ranks, Snapshot, latest_checkpoint, write_checkpoint


def save(folder: Path, size: int, step: int, **fault: Any) -> list[str | None]:
    return run_processes("tests.processes.checkpoints:save", size, folder=str(folder), step=step, **fault)


def check_whole(folder: Path, step: int) -> None:
    """The newest is that of the step, and what every rank of two saved is in it."""
    for rank in range(2):
        found = latest_checkpoint(folder, pytest.fail, Ranks(Mesh(rank, data=2)))
        assert found is not None and found.step == step
        assert torch.equal(found.entries["slot/cut"].tensor, (torch.arange(SIZE) + found.progress["step"]).view(-1, 2))
        assert found.entries["random"].tensor.tolist() == [rank, found.progress["step"]]
        assert all(torch.equal(found.entries[f"parameter/{i}"].tensor, torch.full((100,), step + i)) for i in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_processes_write_one_checkpoint_together(tmp_path: Path, size: int) -> None:
    assert save(tmp_path, size, 1) == ["written"] * size
    (path,) = tmp_path.iterdir()
    sizes = [file.stat().st_size for file in sorted(path.glob("rank-*"))]
    assert len(sizes) == size and max(sizes) < 1.5 * min(sizes)
    found = latest_checkpoint(tmp_path, pytest.fail)
    assert found is not None and torch.equal(found.entries["slot/cut"].tensor, (torch.arange(SIZE) + 1).view(-1, 2))


FAULTS = [  # who is killed, before or after what, and whether the new one is whole by then
    (0, "save_file", True, False),
    (0, "save_file", False, False),
    (0, "sync", False, False),
    (0, "write_index", True, False),
    (0, "write_index", False, False),
    (0, "replace", True, False),
    (0, "replace", False, True),
    (0, "_remove_others", True, True),
    (1, "save_file", True, False),
    (1, "save_file", False, False),
    (1, "sync", False, False),
]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "call", "is_before", "is_whole"), FAULTS)
def test_killed_anywhere_it_leaves_a_whole_checkpoint(
    tmp_path: Path, victim: int, call: str, is_before: bool, is_whole: bool
) -> None:
    save_on(2, tmp_path, lambda rank: snapshot_of(rank, 2, 1))
    said = save(tmp_path, 2, 2, victim=victim, call=call, is_before=is_before)
    assert said[victim] is None and said[1 - victim] in ("lost", "written")
    check_whole(tmp_path, 2 if is_whole else 1)
    write_checkpoint(tmp_path, snapshot_of(0, 1, 3))
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())  # what was left half written is gone


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "call", "is_before", "is_whole"), [FAULTS[1], FAULTS[3], FAULTS[4], FAULTS[9]])
def test_killed_while_the_same_step_is_written_again(
    tmp_path: Path, victim: int, call: str, is_before: bool, is_whole: bool
) -> None:
    # Once the old one was removed before the new one was renamed: killed in between, there was none.
    save_on(2, tmp_path, lambda rank: snapshot_of(rank, 2, 1))
    was = (tmp_path / "step-0000000001" / "index.json").read_bytes()
    save(tmp_path, 2, 1, victim=victim, call=call, is_before=is_before)
    check_whole(tmp_path, 1)
    is_new = (tmp_path / "step-0000000001" / "index.json").read_bytes() != was
    assert is_new == (is_whole or (call, is_before) == ("write_index", False))
    write_checkpoint(tmp_path, Snapshot(1, {}))
    assert [path.name for path in (tmp_path / "step-0000000001").iterdir()] == ["index.json"]
