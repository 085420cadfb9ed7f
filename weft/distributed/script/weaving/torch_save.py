"""`torch.save` on many ranks: every file is whole, and where several ranks write one path it is rank 0's.

    rank 0    torch.save(state, "last.pt")     .last.pt.1f6e0c52.tmp -> last.pt       marked: rank 0, the 3rd here
    rank 1    torch.save(state, "last.pt")     finds the mark of a 3rd or later one, and leaves it
    rank 1    torch.save(mine, "part-1.pt")    .part-1.pt.9c20a4d7.tmp -> part-1.pt   nobody else writes it

No rank waits for another, so a script may as well save on one rank alone. A rank that comes before rank 0 writes its
own, which is replaced when rank 0 comes. The mark is an extended attribute of the file; where a file system has none,
the last one to come stays, whole all the same.

A model that is saved as a whole is saved as it was before `weave`.
"""

import functools
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from weft.atomic import use_folder_lock
from weft.distributed.script.weaving.own_hooks import use_bare
from weft.distributed.script.weaving.weaving import weavings_of
from weft.distributed.script.world.world import World, find_world

__all__ = ["guard_torch_save"]

MARK = "user.weft.first"


def guard_torch_save(world: World) -> None:
    """From now on, `torch.save` of this rank writes whole files, and leaves to rank 0 what rank 0 writes too; in one
    process it saves as it always did. All ranks of a world call it; a second time it does nothing."""
    if world.num_ranks > 1 and world not in _saves:
        run = torch.frombuffer(bytearray(token_bytes(8)), dtype=torch.int64)  # one name for the run, and no other's
        world.group.broadcast(run)
        _saves[world] = _Saves(world.rank, str(run.item()))
    if not hasattr(torch.save, "__weft__"):
        torch.save = _guard(torch.save)


def _guard(right: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(right)
    def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        world = find_world()
        saves = _saves.get(world)
        with use_bare([place for weaving in weavings_of(world) for place in weaving.attached]):
            if saves is None or not isinstance(f, (str, os.PathLike)) or not _is_replaceable(Path(f)):
                return right(obj, f, *arguments, **options)
            return saves.write(Path(f), lambda scratch: right(obj, scratch, *arguments, **options))

    save.__weft__ = True  # type: ignore[attr-defined]
    return save


def _is_replaceable(path: Path) -> bool:
    """Whether the path is, or will be, a plain file: a device or a pipe is written to as it is."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return path.parent.is_dir()


@final
class _Saves:
    """Counts what one rank has saved so far, by path."""

    def __init__(self, rank: int, run: str) -> None:
        self._rank = rank
        self._run = run
        self._counts: Counter[Path] = Counter()

    def write(self, path: Path, write: Callable[[Path], None]) -> None:
        path = path.resolve()  # a link stays one: what it points to is replaced
        self._counts[path] += 1
        if self._is_left_to_rank_0(path):
            return
        scratch = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
        try:
            write(scratch)
            with suppress(OSError):
                shutil.copymode(path, scratch)
            self._mark(scratch, path)
            with use_folder_lock(path.parent):
                if not self._is_left_to_rank_0(path):
                    os.replace(scratch, path)
        finally:
            with suppress(OSError):
                scratch.unlink()

    def _mark(self, scratch: Path, path: Path) -> None:
        if self._rank == 0:
            # The file's number too: copies of a file have its attributes.
            mark = f"{self._run} {scratch.stat().st_ino} {self._counts[path]}"
            with suppress(OSError, AttributeError):
                os.setxattr(scratch, MARK, mark.encode())

    def _is_left_to_rank_0(self, path: Path) -> bool:
        """Whether rank 0 has written this very file, as often as this rank has come to write it or more often."""
        if self._rank == 0:
            return False
        try:
            run, number, count = os.getxattr(path, MARK).decode().split()
            return (run, int(number)) == (self._run, path.stat().st_ino) and int(count) >= self._counts[path]
        except (OSError, AttributeError, ValueError):
            return False


_saves: WeakKeyDictionary[World, _Saves] = WeakKeyDictionary()
