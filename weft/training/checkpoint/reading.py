"""Reading a checkpoint: each rank the chunks that it needs, memory-mapped, every one of them checked."""

import hashlib
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import CorruptFileError, RunFolderError
from weft.training.checkpoint.cut import Cut, HeldPart, whole_cut
from weft.training.checkpoint.entry import ALONE, Entry, Ranks, Snapshot, mean_of, move, subject_of
from weft.training.checkpoint.index import Chunk, ChunkedTensor, Index, Row, read_index, sha256_of
from weft.training.checkpoint.part import Part, copy_overlaps, overlaps

__all__ = ["ChunkReader", "checkpoints_in", "latest_checkpoint", "read_checkpoint"]

_FOLDER = re.compile(r"step-(\d{10})")


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name))


def read_checkpoint(
    path: Path, ranks: Ranks = ALONE, *, is_wanted: Callable[[str], bool] = lambda name: True
) -> Snapshot:
    """Read what one rank needs of a checkpoint, whoever saved it.

    Weights and slots of a rank's own are for ranks that come together as those did who saved them. With another
    consistency all begin with the mean: synchronous ranks that began apart would stay apart.

    Args:
        is_wanted: whether an entry is read at all.

    Raises:
        CorruptFileError: if a chunk that is needed is missing or damaged, by name.
    """
    index = read_index(path)
    entries: dict[str, Entry] = {}
    with ChunkReader(path, index) as reader:
        rows = {name: row for name, row in index.rows.items() if is_wanted(name)}
        needed = {name: row for name, row in rows.items() if subject_of(name) not in ranks.elsewhere}
        for name, row in needed.items():
            entry = _entry_for(name, row, reader, ranks, goes_on=_goes_on(index, ranks))
            if entry is not None:
                entries[name] = entry
    return Snapshot(index.step, entries, index.progress, frozenset(needed.keys() - entries.keys()))


def latest_checkpoint(
    folder: Path | None,
    on_damage: Callable[[str], None],
    ranks: Ranks = ALONE,
    read: Callable[[Path, Ranks], Snapshot] = read_checkpoint,
) -> Snapshot | None:
    """The newest checkpoint of which every rank can read what it needs; each that is damaged on the way is told to
    `on_damage`, on all ranks. None if there is none. All ranks call this; one that begins anew gives no folder.

    Args:
        read: what a rank needs of a checkpoint.

    Raises:
        CorruptFileError: if there are checkpoints and none is whole.
        RunFolderError: if ranks do not see the same checkpoints.
    """
    candidates = checkpoints_in(folder) if folder else []
    for path in reversed(candidates):
        found = _try(path, ranks, read)
        damage = _agree(int(path.name.removeprefix("step-")), found if isinstance(found, str) else "", ranks)
        for text in damage:
            on_damage(text)
        if isinstance(found, Snapshot) and not damage:
            return found
    _agree(None, "", ranks)  # a rank that sees one hears that this one does not
    if candidates:
        raise CorruptFileError(f"no checkpoint is whole (looked at: {len(candidates)} in {folder}); start a new run")
    return None


def _try(path: Path, ranks: Ranks, read: Callable[[Path, Ranks], Snapshot]) -> Snapshot | str:
    """A rank's snapshot, or the damage that it met."""
    try:
        return read(path, ranks)
    except CorruptFileError as error:
        return str(error)


def _agree(step: int | None, damage: str, ranks: Ranks) -> list[str]:
    """Every damage that some rank met in the checkpoint that all of them look at."""
    said: list[dict[str, Any]] = ranks.gather_json({"step": step, "damage": damage})
    steps = [one["step"] for one in said]
    if len(set(steps)) > 1:
        raise RunFolderError(f"ranks do not find the same checkpoint (steps: {steps}); give them one shared folder")
    return list(dict.fromkeys(one["damage"] for one in said if one["damage"]))


def _goes_on(index: Index, ranks: Ranks) -> bool:
    """Whether ranks go on from weights of their own. Checkpoints that do not say how ranks came together were written
    before it was kept; relaxed ranks have always gone on from their own."""
    own = ranks.consistency
    return own is not None and index.progress.get("consistency", own) == own


def _entry_for(name: str, row: Row, reader: "ChunkReader", ranks: Ranks, *, goes_on: bool) -> Entry | None:
    """An entry as one rank gets it; None if it has no part in it."""
    num_saved, size, cut = len(row.tensors), ranks.mesh.num_replicas, ranks.cut_of(name)
    if cut is not None and cut.shape != row.tensors[0].shape:
        cut = None  # it is about the parameter of that name, not a tensor of its shape: a count of steps
    is_of_scheme = row.kind == "own" and name != "random"
    if is_of_scheme and not (goes_on and num_saved == size):
        return None  # what a scheme remembers of the way to weights that no rank has any more

    def read(i: int) -> Tensor:
        return reader.read(name, i, cut)

    if row.kind == "mean" and not goes_on and not name.startswith("buffer/"):
        tensor: Tensor | None = mean_of([read(i) for i in range(num_saved)])
    else:
        tensor = move(row.kind, num_saved, ranks.mesh.replica, size, read)
    if tensor is None:
        return None
    return Entry(tensor, row.kind, cut)


def _damage(fact: str, name: str, part: Part, file: Path) -> CorruptFileError:
    where = f"entry: {name}, offset: {part.offset}, length: {part.length}, file: {file}"
    return CorruptFileError(f"checkpoint chunk {fact} ({where})")


@final
class ChunkReader:
    """The tensors of a checkpoint, as a whole or in part. A context manager: files stay open meanwhile."""

    def __init__(self, path: Path, index: Index) -> None:
        self._path = path
        self._index = index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "ChunkReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def read(self, name: str, number: int, cut: Cut | None = None) -> Tensor:
        """The `number`-th tensor of an entry, in memory of its own; or what a cut leaves of it."""
        row = self._index.rows[name]
        tensor = row.tensors[number]
        cut = cut or whole_cut(tensor.shape)
        target = torch.empty(cut.held_shape, dtype=row.dtype)
        for held in cut.parts:
            self._read_part(name, row, tensor, held, target)
        return target

    def _read_part(self, name: str, row: Row, tensor: ChunkedTensor, held: HeldPart, target: Tensor) -> None:
        view, part, num_copied = held.of(target), held.part, 0
        memory = view if view.is_contiguous() else torch.empty(part.length, dtype=row.dtype)
        for chunk in tensor.chunks:
            if found := overlaps(part, chunk.part, tensor.shape):
                num_copied += copy_overlaps(found, memory, self._checked(name, row.dtype, chunk))
        if num_copied != part.size:
            raise _damage("is not in the index as a whole", name, part, self._path)
        if memory is not view:
            view.copy_(memory)

    def _checked(self, name: str, dtype: torch.dtype, chunk: Chunk) -> Tensor:
        """The chunk in the mapped file, after all of it has been read once for its checksum."""
        file = self._path / chunk.file
        try:
            opened = self._open(chunk.file)
            found: Tensor = opened.get_tensor(chunk.key)
        except (SafetensorError, OSError) as error:
            raise _damage(f"cannot be read: {error}", name, chunk.part, file) from error
        if (found.dtype, tuple(found.shape)) != (dtype, chunk.part.length):
            raise _damage(f"has another shape or type, {found.dtype} {tuple(found.shape)}", name, chunk.part, file)
        if chunk.sha256 and sha256_of(found) != chunk.sha256:
            raise _damage("is damaged: checksum differs", name, chunk.part, file)
        return found

    def _open(self, name: str) -> Any:
        """A file of format 1 has one checksum for the whole of it."""
        if name not in self._files:
            file = self._path / name
            if name in self._index.files:
                with file.open("rb") as stream:
                    if hashlib.file_digest(stream, "sha256").hexdigest() != self._index.files[name]:
                        raise OSError("checksum of the file differs")
            self._files[name] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._files[name]
