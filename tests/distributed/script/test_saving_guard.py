"""`torch.save` by many ranks: files are whole, and one path is rank 0's."""

import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.script.virtual_script import run_script
from tests.processes.ranks import run_processes
from weft.distributed.script.weaving.torch_save import guard_torch_save
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.world.world import find_world


@pytest.fixture(autouse=True)
def torch_save_is_put_back() -> Iterator[None]:
    right = torch.save
    yield
    torch.save = right


def on_guarded_ranks(script: Callable[[int], Any], size: int) -> list[Any]:
    def guarded() -> Any:
        world = find_world()
        guard_torch_save(world)
        guard_torch_save(world)  # woven twice
        return script(world.rank)

    return run_script(guarded, size)


def in_order(*ranks: int) -> Callable[[int], Iterator[None]]:
    """Ranks come to it one after the other, as given."""

    def turns(rank: int) -> Iterator[None]:
        for turn in ranks:
            if turn == rank:
                yield
            find_world().group.barrier()

    return turns


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 1)])
def test_one_path_holds_what_rank_0_saved_last(tmp_path: Path, order: tuple[int, ...]) -> None:
    turns = in_order(*order)

    def script(rank: int) -> None:
        for number, _ in enumerate(turns(rank)):
            torch.save({"rank": rank, "number": number}, tmp_path / "last.pt")

    on_guarded_ranks(script, 3)
    assert torch.load(tmp_path / "last.pt") == {"rank": 0, "number": order.count(0) - 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def test_ranks_write_paths_of_their_own_and_what_rank_0_leaves_to_them(tmp_path: Path) -> None:
    turns = in_order(0, 1, 1)

    def script(rank: int) -> None:
        torch.save(rank, tmp_path / f"part-{rank}.pt")
        for number, _ in enumerate(turns(rank)):
            torch.save((rank, number), str(tmp_path / "last.pt"))

    on_guarded_ranks(script, 2)
    assert [torch.load(tmp_path / f"part-{rank}.pt") for rank in range(2)] == [0, 1]
    assert torch.load(tmp_path / "last.pt") == (1, 1)  # rank 1 alone saves a second time


def test_files_of_an_earlier_run_and_copies_are_written_over(tmp_path: Path) -> None:
    def save(path: Path, value: int, by: int) -> Callable[[int], None]:
        def script(rank: int) -> None:
            if rank == by:
                torch.save(value, path)

        return script

    on_guarded_ranks(save(tmp_path / "a.pt", 1, 0), 2)
    on_guarded_ranks(save(tmp_path / "a.pt", 2, 1), 2)  # another run, in which rank 1 alone saves
    assert torch.load(tmp_path / "a.pt") == 2

    def copied(rank: int) -> None:
        if rank == 0:
            torch.save(3, tmp_path / "b.pt")
            shutil.copy2(tmp_path / "b.pt", tmp_path / "c.pt")  # with its attributes
        find_world().group.barrier()
        save(tmp_path / "c.pt", 4, 1)(rank)

    on_guarded_ranks(copied, 2)
    assert torch.load(tmp_path / "c.pt") == 4


def test_links_modes_and_open_files_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real.pt").touch(mode=0o640)
    (tmp_path / "link.pt").symlink_to("real.pt")

    def script(rank: int) -> None:
        torch.save(5, tmp_path / "link.pt")
        torch.save(6, os.devnull)
        if rank == 0:
            with (tmp_path / "open.pt").open("wb") as file:
                torch.save(7, file)
            with pytest.raises(RuntimeError, match="does not exist"):
                torch.save(8, tmp_path / "absent" / "a.pt")

    on_guarded_ranks(script, 2)
    assert (tmp_path / "link.pt").is_symlink() and torch.load(tmp_path / "real.pt") == 5
    assert stat.S_IMODE((tmp_path / "real.pt").stat().st_mode) == 0o640
    assert torch.load(tmp_path / "open.pt") == 7


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path: Path) -> None:
    def script(rank: int) -> None:
        torch.save(1, tmp_path / "a.pt")
        with pytest.raises(Exception, match=r"pickle|local object"):
            torch.save(lambda: 0, tmp_path / "a.pt")

    on_guarded_ranks(script, 2)
    assert torch.load(tmp_path / "a.pt") == 1 and os.listdir(tmp_path) == ["a.pt"]


def test_one_process_saves_as_it_always_did(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save(1, file)
    before = file.stat().st_ino
    guard_torch_save(find_world())
    torch.save(2, file)
    assert file.stat().st_ino == before, "written in its place"
    assert torch.load(file) == 2 and os.listdir(tmp_path) == ["a.pt"]


def save_again_and_again(target: str, times: int, *, is_guarded: bool = True) -> int:
    """What a rank of its own does; the number of reads that found no whole file."""
    world = find_world()
    if is_guarded:
        guard_torch_save(world)
    world.group.barrier()
    damaged = 0
    for number in range(times):
        torch.save({"number": number, "weight": torch.full((100_000,), float(number))}, target)
        try:
            found = torch.load(target)
            damaged += int(not (found["weight"] == found["number"]).all())
        except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError):
            damaged += 1
    world.group.barrier()
    return damaged


@pytest.mark.slow
def test_processes_save_and_read_one_path_at_once(tmp_path: Path) -> None:
    # Before the guard, reading it back failed in three of three tries.
    this = "tests.distributed.script.test_saving_guard:save_again_and_again"
    assert run_processes(this, 3, target=str(tmp_path / "a.pt"), times=30) == [0, 0, 0]
    assert torch.load(tmp_path / "a.pt")["number"] == 29 and os.listdir(tmp_path) == ["a.pt"]
    assert sum(run_processes(this, 3, target=str(tmp_path / "b.pt"), times=30, is_guarded=False)) > 0


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_is_saved_as_a_whole_without_what_weave_put_there(tmp_path: Path, size: int) -> None:
    """Hooks and a global batch norm could not be pickled, and are nothing to whoever reads the file."""

    def script() -> bool:
        model, _, _ = weave(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), None, None, batch_norm="global")
        torch.save(model, tmp_path / "whole.pt")
        return ("forward" in vars(model[1])) == (size > 1) and bool(model._load_state_dict_post_hooks)

    assert run_script(script, size) == [True] * size, "and is there again after it"
    assert b"weft" not in (tmp_path / "whole.pt").read_bytes(), "it can be read where Weft is not installed"
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d]):
        read = torch.load(tmp_path / "whole.pt")
    assert type(read[1]).forward == nn.BatchNorm1d.forward
    read.load_state_dict(read.state_dict())
