"""The tensors that one rank needs of a script's checkpoint, whoever wrote it.

kind      as many ranks as saved                        another number
global    the same for all, or the part that it needs   the same
sum       its own                                       an equal part of the sum
mean      its own; of an optimizer only where ranks     the mean
          come together as those did who saved
own       its own                                       rank 0's
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.distributed.script.saving.parts import OWN, from_bytes
from weft.distributed.script.saving.structure import put_together, tensor_names
from weft.distributed.script.saving.woven import find_cut, memory_name
from weft.errors import CorruptFileError, UsageError, nearest
from weft.specs import Mesh
from weft.training.checkpoint import Cut, Entry, Ranks, Snapshot
from weft.training.checkpoint.entry import mean_of, move
from weft.training.checkpoint.index import Index, read_index
from weft.training.checkpoint.reading import ChunkReader

__all__ = ["FORMAT", "RANDOM", "Wanted", "goes_on", "part_from"]

FORMAT = 1
"""Of what a script keeps in the progress of a checkpoint."""
RANDOM = "weft/random"


@dataclass(frozen=True)
class Wanted:
    """The parts that a rank asks of a checkpoint.

    Args:
        parts: objects, by name; every plain value comes with them.
        weavings: the consistency of each plan whose model is among them, by number.
        number_of: the plan that a part is trained by.
        cuts: the part of a tensor that is needed, by its name, or by what that begins with and a slash; else all.
        meshes: of each plan, by number: its replicas have running statistics of their own, and residuals.
    """

    parts: Collection[str] = ()
    weavings: Mapping[int, str | None] = field(default_factory=dict)
    number_of: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    meshes: Mapping[int, Mesh] = field(default_factory=dict)

    def read(self, path: Path, ranks: Ranks) -> Snapshot:
        """As `read_checkpoint` does, of these parts alone.

        Raises:
            CorruptFileError: a chunk that is needed is missing or damaged, by name.
            UsageError: the checkpoint is not that of a script, or lacks a part.
        """
        index = read_index(path)
        _check_parts(path, index, self.parts)
        with ChunkReader(path, index) as reader:
            entries = {
                name: Entry(self._read(name, index, reader, ranks), index.rows[name].kind)
                for name in self._names(index, ranks)
            }
        return Snapshot(index.step, entries, index.progress)

    def _names(self, index: Index, ranks: Ranks) -> list[str]:
        names, size = [RANDOM], ranks.mesh.num_replicas
        for part, facts in index.progress["parts"].items():
            if facts["is_object"] and part not in self.parts:
                continue
            names += [facts["own"]] if "own" in facts else tensor_names(facts["structure"])
            if part in self.number_of and self._goes_on(part, index, size):
                names += [name for name in index.rows if name.startswith(f"{OWN}{part}/")]
        for number, consistency in self.weavings.items():
            is_same = goes_on(index.progress, number, consistency, size)
            memory = {name: row for name, row in index.rows.items() if name.startswith(memory_name(number))}
            names += [name for name, row in memory.items() if row.kind != "own" or is_same]
        if missing := [name for name in names if name not in index.rows]:
            raise CorruptFileError(f"checkpoint lacks an entry ({missing[0]})")
        return names

    def _goes_on(self, part: str, index: Index, size: int) -> bool:
        number = self.number_of[part]
        return goes_on(index.progress, number, self.weavings.get(number), size)

    def _read(self, name: str, index: Index, reader: ChunkReader, ranks: Ranks) -> Tensor:
        row, size = index.rows[name], ranks.mesh.num_replicas
        cut = find_cut(self.cuts, name)
        own = cut if cut is not None and cut.shape == row.tensors[0].shape else None
        saved, part = len(row.tensors), name.partition("/")[0]

        def read(rank: int) -> Tensor:
            return reader.read(name, rank, own)

        if row.kind == "own":
            return read(ranks.mesh.rank if saved == size else 0)
        is_optimizer = row.kind == "mean" and index.progress["parts"].get(part, {}).get("is_optimizer")
        if is_optimizer and not (part in self.number_of and self._goes_on(part, index, size)):
            return mean_of([read(rank) for rank in range(saved)])
        mesh = self._mesh_of(name, ranks)
        found = move(row.kind, saved, mesh.replica, mesh.num_replicas, read)
        assert found is not None, "there is something for every rank in all but own tensors"
        return found

    def _mesh_of(self, name: str, ranks: Ranks) -> Mesh:
        """The mesh whose replicas have the tensor, each its own."""
        part = name.partition("/")[0]
        woven = (number for number in self.weavings if name.startswith(memory_name(number)))
        return self.meshes.get(self.number_of.get(part, next(woven, -1)), ranks.mesh)


def goes_on(progress: Mapping[str, Any], number: int, consistency: str | None, size: int) -> bool:
    """Whether the ranks of a plan go on each with what is its own: they are as many as saved, and come together as
    those did."""
    saved: list[dict[str, Any]] = progress["weavings"]
    is_known = consistency is not None and number < len(saved) and progress["ranks"] == size
    return is_known and bool(saved[number]["consistency"] == consistency)


def part_from(facts: Mapping[str, Any], entries: Mapping[str, Entry], own: str = "") -> Any:
    """The value of a part, put together.

    Args:
        own: what the names of those tensors begin with that stand in the place of others: this rank's own weights.
    """
    if "own" in facts:
        taken = from_bytes(entries[facts["own"]].tensor)
        return put_together(taken.structure, taken.tensors.__getitem__)

    def find(name: str) -> Tensor:
        return entries[f"{own}{name}" if f"{own}{name}" in entries else name].tensor

    return put_together(facts["structure"], find)


def _check_parts(path: Path, index: Index, parts: Collection[str]) -> None:
    if "script" not in index.progress:
        raise UsageError(f"checkpoint is not that of a script ({path}); go on with weft run --resume")
    if index.progress["script"] > FORMAT:
        numbers = f"{path}: {index.progress['script']}, known: {FORMAT}"
        raise CorruptFileError(f"checkpoint is of a newer format ({numbers})")
    known = {name: facts["is_object"] for name, facts in index.progress["parts"].items()}
    for part in parts:
        if part not in known:
            raise UsageError(f"checkpoint has no such part ({part}, {path}); {nearest(part, known)}")
        if not known[part]:
            raise UsageError(f"part was saved as a plain value ({part}, {path}); take it from what load returns")
