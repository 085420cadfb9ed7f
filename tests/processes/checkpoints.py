"""What ranks run in tests of checkpoints: they write one together, and one of them may be killed on the way."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.distributed.group import kill_this_process
from weft.distributed.place import find_launch, open_group
from weft.distributed.placement.data_parallel import DataParallel
from weft.errors import PeerLostError
from weft.specs import Mesh
from weft.training.checkpoint import Cut, Entry, Ranks, Snapshot, flat, write_checkpoint, writing

SIZE = 2000


def snapshot_of(rank: int, size: int, step: int) -> Snapshot:
    """Tensors of every kind whose values tell the step; of one of them each rank has a part."""
    start, end = SIZE * rank // size, SIZE * (rank + 1) // size
    entries = {f"parameter/{i}": Entry(torch.full((100,), float(step + i))) for i in range(4)}
    entries["slot/cut"] = Entry((torch.arange(SIZE) + step)[start:end], cut=Cut((SIZE // 2, 2), flat(start, end)))
    entries["random"] = Entry(torch.tensor([rank, step]), "own")
    return Snapshot(step, entries, {"step": step})


def save(folder: str, step: int, victim: int = -1, call: str = "", is_before: bool = False) -> str:
    """Write a checkpoint; the victim is killed before or after the call of that name."""
    group = open_group(find_launch(), "shared_memory", timeout=20)
    if group.rank == victim:
        plant(call, is_before)
    ranks = Ranks(Mesh(group.rank, data=group.size), DataParallel(group).gather)
    try:
        write_checkpoint(Path(folder), snapshot_of(group.rank, group.size, step), ranks)
    except PeerLostError:
        return "lost"
    finally:
        group.close()
    return "written"


def plant(call: str, is_before: bool) -> None:
    """Kill this process before or after the call of that name."""
    where: Any = os if call == "replace" else writing
    right: Callable[..., Any] = getattr(where, call)

    def fatal(*arguments: Any, **options: Any) -> Any:
        is_meant = call != "replace" or Path(arguments[0]).is_dir()  # the index is renamed too, before the folder
        if is_meant and is_before:
            kill_this_process()
        result = right(*arguments, **options)
        if is_meant:
            kill_this_process()
        return result

    setattr(where, call, fatal)
