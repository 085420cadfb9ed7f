"""Ranks that save and load together, as threads that take turns."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from weft.distributed.group import AbstractGroup
from weft.distributed.placement.data_parallel import DataParallel
from weft.distributed.virtual import run_virtual
from weft.specs import Mesh
from weft.training.checkpoint import Cut, Ranks, Snapshot, latest_checkpoint, write_checkpoint

CutOf = Callable[[str], Cut | None]


def whole_of(_name: str) -> None:
    """Every rank holds all of every tensor."""


def ranks_over(group: AbstractGroup, cut_of: CutOf = whole_of) -> Ranks:
    mesh = Mesh(group.rank, data=group.size)
    return Ranks(mesh, DataParallel(group).gather, cut_of)


def save_on(size: int, folder: Path, snapshot_of: Callable[[int], Snapshot]) -> Path:
    """Each of the ranks writes its snapshot."""

    def program(group: AbstractGroup) -> Path:
        return write_checkpoint(folder, snapshot_of(group.rank), ranks_over(group))

    paths: set[Path] = set(run_virtual(program, size).results)
    return paths.pop()


def load_on(
    size: int,
    folder: Path,
    cut_of: Callable[[int], CutOf] = lambda rank: whole_of,
    on_damage: Callable[[int, str], None] = lambda rank, text: None,
) -> list[Snapshot | None]:
    """What each of the ranks finds."""

    def program(group: AbstractGroup) -> Snapshot | None:
        ranks = ranks_over(group, cut_of(group.rank))
        return latest_checkpoint(folder, partial(on_damage, group.rank), ranks)

    return list(run_virtual(program, size).results)
