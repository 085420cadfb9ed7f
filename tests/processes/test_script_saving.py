"""`weft.save` on real processes, one of which is killed on the way."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import weft
from tests.processes.ranks import run_processes

FAULTS = [  # who is killed, before or after what, and whether the new one is whole by then
    (0, "save_file", False, False),
    (0, "replace", True, False),
    (0, "replace", False, True),
    (1, "sync", False, False),
]


def save(path: Path, epochs: list[int], fault: dict[str, Any]) -> list[str | None]:
    return run_processes("tests.processes.script_saving:save", 2, folder=str(path), epochs=epochs, **fault)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "call", "is_before", "is_whole"), FAULTS)
def test_killed_anywhere_it_leaves_a_checkpoint(
    tmp_path: Path, victim: int, call: str, is_before: bool, is_whole: bool
) -> None:
    path, fault = tmp_path / "c", {"victim": victim, "call": call, "is_before": is_before}
    said = save(path, [1, 2], fault)
    assert said[victim] is None and said[1 - victim] == "lost"
    model = nn.Linear(40, 50)
    epoch = 2 if is_whole else 1
    assert weft.load(path, model=model) == {"epoch": epoch, "rank": 0}
    assert (model.weight == epoch).all()
    weft.save(path, model=model, epoch=3)
    assert all(found.name.startswith("step-") for found in path.iterdir())  # what was left half written is gone


@pytest.mark.slow
def test_killed_in_the_first_there_is_no_path(tmp_path: Path) -> None:
    fault = {"victim": 0, "call": "write_index", "is_before": True}
    save(tmp_path / "c", [1], fault)
    assert not (tmp_path / "c").exists()  # so that a script may ask
    weft.save(tmp_path / "c", epoch=2)
    assert [found.name for found in tmp_path.iterdir()] == ["c"]
