"""Checkpoints: named tensors with a layout each, as safetensors files with a JSON index.

    checkpoint/
      step-0000000040/
        index.json                 format, progress, every entry's layout, shape and type, every file's checksum
        rank-00000.safetensors     the parts that rank 0 saved
      step-0000000080/             newest last; the one before is kept, in case the newest does not survive

Any number of ranks can load what any number of ranks saved (layout.py).
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.atomic import use_new_folder, write_json
from weft.errors import CorruptFileError
from weft.records.strict_json import decode_json, encode_json, parse_json
from weft.training.layout import Layout, part_for

__all__ = ["FORMAT", "Entry", "Snapshot", "latest_checkpoint", "read_checkpoint", "write_checkpoint"]

FORMAT = 1
_FOLDER = re.compile(r"step-\d{10}")


@dataclass(frozen=True)
class Entry:
    """One named tensor: a part per rank that saved it (a single part when all ranks hold the same)."""

    layout: Layout
    parts: tuple[Tensor, ...]

    def of_rank(self, rank: int, world_size: int) -> Tensor | None:
        return part_for(self.layout, self.parts, rank, world_size)


@dataclass(frozen=True)
class Snapshot:
    """Everything needed to go on: tensors by name, and progress that JSON can hold."""

    step: int
    entries: Mapping[str, Entry]
    progress: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(folder: Path, snapshot: Snapshot, *, keep: int = 2) -> Path:
    """Write `folder/step-N` as a whole or not at all, then remove all but it and the `keep - 1` before it.

    Later ones go as well: a run that writes step N again has gone back behind them, because they are damaged.
    """
    path = folder / f"step-{snapshot.step:010d}"
    num_ranks = max((len(e.parts) for e in snapshot.entries.values()), default=1)
    with use_new_folder(path) as scratch:
        for rank in range(num_ranks):
            _save_tensors(_parts_of_rank(snapshot.entries, rank), scratch / _file_of(rank))
        write_json(scratch / "index.json", _index(snapshot, [scratch / _file_of(r) for r in range(num_ranks)]))
        if path.exists():  # the same step again, by a run that was resumed: gone only now that the new one is written
            shutil.rmtree(path)
    kept = [found for found in _checkpoints(folder) if found <= path][-keep:]
    for found in _checkpoints(folder):
        if found not in kept:
            shutil.rmtree(found, ignore_errors=True)
    return path


def read_checkpoint(path: Path) -> Snapshot:
    """Read one checkpoint folder, checking every checksum, shape and type against the index."""
    index = _read_index(path)
    files = [path / name for name in sorted(index["files"])]
    try:
        for file in files:
            if not file.is_file() or _sha256(file) != index["files"][file.name]:
                raise CorruptFileError(f"checkpoint file is missing or damaged ({file})")
        tensors = [load_file(file) for file in files]
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"checkpoint file cannot be read ({path}: {error})") from error
    entries = {name: _entry(name, facts, tensors) for name, facts in index["entries"].items()}
    return Snapshot(index["step"], entries, decode_json(index["progress"]))


def latest_checkpoint(folder: Path, on_damage: Callable[[str], None]) -> Snapshot | None:
    """The newest checkpoint that is whole; each damaged one on the way is told to `on_damage`. None if there is none.

    Raises:
        CorruptFileError: if there are checkpoints and none is whole.
    """
    candidates = _checkpoints(folder)
    for path in reversed(candidates):
        try:
            return read_checkpoint(path)
        except CorruptFileError as error:
            on_damage(str(error))
    if candidates:
        raise CorruptFileError(f"no checkpoint is whole (looked at: {len(candidates)} in {folder}); start a new run")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _FOLDER.fullmatch(path.name))


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _parts_of_rank(entries: Mapping[str, Entry], rank: int) -> dict[str, Tensor]:
    # safetensors refuses tensors that share memory (tied or viewed), hence the clone.
    return {
        name: entry.parts[rank].detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, entry in entries.items()
        if rank < len(entry.parts)
    }


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # a full disk among others: safetensors does not raise OSError
        raise OSError(str(error)) from error


def _index(snapshot: Snapshot, files: Sequence[Path]) -> dict[str, Any]:
    entries = {
        name: {
            "layout": entry.layout.to_dict(),
            "dtype": str(entry.parts[0].dtype).removeprefix("torch."),
            "shapes": [list(part.shape) for part in entry.parts],
        }
        for name, entry in snapshot.entries.items()
    }
    checksums = {file.name: _sha256(file) for file in files}
    body = {"format": FORMAT, "step": snapshot.step, "progress": encode_json(snapshot.progress)}
    index = {**body, "entries": entries, "files": checksums}
    return {**index, "sha256": _sha256_of_json(index)}


def _read_index(path: Path) -> dict[str, Any]:
    file = path / "index.json"
    try:
        index = parse_json(file.read_text(encoding="utf-8"))
        claimed, version = index.pop("sha256"), int(index["format"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"checkpoint index cannot be read ({file}: {error})") from error
    if version > FORMAT:
        raise CorruptFileError(f"checkpoint is of a newer format ({file}: {version}, known: {FORMAT})")
    if claimed != _sha256_of_json(index):
        raise CorruptFileError(f"checkpoint index is damaged ({file}: checksum differs)")
    return dict(index)


def _entry(name: str, facts: dict[str, Any], tensors: Sequence[Mapping[str, Tensor]]) -> Entry:
    parts = tuple(of_rank[name] for of_rank in tensors if name in of_rank)
    found = [list(part.shape) for part in parts]
    dtypes = {str(part.dtype).removeprefix("torch.") for part in parts}
    if found != facts["shapes"] or dtypes != {facts["dtype"]}:
        raise CorruptFileError(f"checkpoint entry is not what its index says ({name}: {found}, {sorted(dtypes)})")
    return Entry(Layout.from_dict(facts["layout"]), parts)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
