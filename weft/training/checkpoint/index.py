"""The index of a checkpoint: which tensors there are, in which chunks they lie, and in which files.

    index.json
      format, step, progress
      entries
        parameter/w            kind global, shape (2, 3)
          chunk                  offset (0, 0)  length (2, 3)  rank-00001.safetensors  sha256
        slot/w/velocity        kind global, shape (2, 3)
          chunk                  offset (0,)    length (3,)    rank-00000.safetensors  sha256
          chunk                  offset (3,)    length (3,)    rank-00001.safetensors  sha256
        random                 kind own
          of rank 0, shape (9,)
            chunk                offset (0,)    length (9,)    rank-00000.safetensors  sha256
          of rank 1, shape (9,)
            chunk                offset (0,)    length (9,)    rank-00001.safetensors  sha256
      sha256                   of all of the above

In a file a chunk has the name of its entry, and its slices behind it if it is not the whole: `slot/w/velocity[3:6]`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from weft.atomic import write_json
from weft.errors import CorruptFileError
from weft.records.strict_json import decode_json, encode_json, parse_json
from weft.training.checkpoint.entry import Kind
from weft.training.checkpoint.part import Part, whole

__all__ = [
    "FORMAT",
    "INDEX",
    "Chunk",
    "ChunkedTensor",
    "Index",
    "Row",
    "key_of",
    "read_index",
    "sha256_of",
    "write_index",
]

FORMAT = 2
INDEX = "index.json"


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file; `key` is its name there."""

    part: Part
    file: str
    key: str
    sha256: str  # of its bytes; empty in format 1, which has the checksums of whole files


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks, which cover it and do not overlap."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Row:
    """An entry: one tensor if it is global, else one for every rank that saved."""

    kind: Kind
    dtype: torch.dtype
    tensors: tuple[ChunkedTensor, ...]


@dataclass(frozen=True)
class Index:
    """All there is to know of a checkpoint without its tensors."""

    step: int
    progress: dict[str, Any]
    rows: Mapping[str, Row]
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by name, in format 1


def key_of(name: str, part: Part, shape: tuple[int, ...]) -> str:
    return name if part == whole(shape) else f"{name}{part}"


def sha256_of(tensor: Tensor) -> str:
    """Of the bytes of a contiguous tensor in the memory of the host."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def write_index(folder: Path, index: Index) -> None:
    """Write it as a whole or not at all, over an older one if there is one."""
    body = {"format": FORMAT, "step": index.step, "progress": encode_json(index.progress)}
    content = {**body, "entries": {name: _row_to_dict(row) for name, row in index.rows.items()}}
    write_json(folder / INDEX, {**content, "sha256": _sha256_of_json(content)})


def read_index(folder: Path) -> Index:
    """Read an index of any format.

    Raises:
        CorruptFileError: if it is not there, damaged, or of a newer format.
    """
    file = folder / INDEX
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        claimed, version = content.pop("sha256"), int(content["format"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"checkpoint index cannot be read ({file}: {error})") from error
    if version > FORMAT:
        raise CorruptFileError(f"checkpoint is of a newer format ({file}: {version}, known: {FORMAT})")
    if claimed != _sha256_of_json(content):
        raise CorruptFileError(f"checkpoint index is damaged ({file}: checksum differs)")
    row_from = _row_from_dict if version == FORMAT else _row_from_format_1
    try:
        rows = {name: row_from(name, facts) for name, facts in content["entries"].items()}
        return Index(content["step"], decode_json(content["progress"]), rows, content.get("files", {}))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"checkpoint index is not one ({file}: {error!r})") from error


# Rows as JSON.


def _row_to_dict(row: Row) -> dict[str, Any]:
    tensors = [{"shape": tensor.shape, "chunks": [_chunk_to_dict(c) for c in tensor.chunks]} for tensor in row.tensors]
    about = {"kind": row.kind, "dtype": str(row.dtype).removeprefix("torch.")}
    return {**about, **tensors[0]} if row.kind == "global" else {**about, "ranks": tensors}


def _chunk_to_dict(chunk: Chunk) -> dict[str, Any]:
    return {"offset": chunk.part.offset, "length": chunk.part.length, "file": chunk.file, "sha256": chunk.sha256}


def _row_from_dict(name: str, facts: dict[str, Any]) -> Row:
    if facts["kind"] not in get_args(Kind):
        raise ValueError(f"unknown kind of {name}: {facts['kind']}")
    tensors = [facts] if facts["kind"] == "global" else facts["ranks"]
    return Row(facts["kind"], _dtype_of(facts), tuple(_tensor_from_dict(name, tensor) for tensor in tensors))


def _dtype_of(facts: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, facts["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown type: {facts['dtype']}")
    return dtype


def _tensor_from_dict(name: str, facts: dict[str, Any]) -> ChunkedTensor:
    shape = tuple(facts["shape"])
    parts = [Part(tuple(chunk["offset"]), tuple(chunk["length"])) for chunk in facts["chunks"]]
    chunks = (
        Chunk(part, chunk["file"], key_of(name, part, shape), chunk["sha256"])
        for part, chunk in zip(parts, facts["chunks"], strict=True)
    )
    return ChunkedTensor(shape, tuple(chunks))


_KINDS_OF_FORMAT_1: Mapping[str, Kind] = {
    "replicated": "global",
    "sharded": "global",
    "summed": "sum",
    "averaged": "mean",
    "per_rank": "own",
}


def _row_from_format_1(name: str, facts: dict[str, Any]) -> Row:
    """There every entry had one tensor from each rank that saved it, the r-th in the file of rank r."""
    layout = facts["layout"]["kind"]
    shapes = [tuple(shape) for shape in facts["shapes"]]
    files = [f"rank-{rank:05d}.safetensors" for rank in range(len(shapes))]
    if layout == "sharded":
        dim = facts["layout"]["dim"]
        starts = list(accumulate((shape[dim] for shape in shapes), initial=0))
        whole_shape = (*shapes[0][:dim], starts[-1], *shapes[0][dim + 1 :])
        parts = [
            Part((*(0,) * dim, start, *(0,) * (len(shape) - dim - 1)), shape)
            for start, shape in zip(starts, shapes, strict=False)
        ]
        chunks = (Chunk(part, file, name, "") for part, file in zip(parts, files, strict=True))
        return Row("global", _dtype_of(facts), (ChunkedTensor(whole_shape, tuple(chunks)),))
    tensors = (
        ChunkedTensor(shape, (Chunk(whole(shape), file, name, ""),)) for shape, file in zip(shapes, files, strict=True)
    )
    # Running statistics were each rank's own there, and a new rank took those of rank 0.
    kind = "mean" if name.startswith("buffer/") and layout == "per_rank" else _KINDS_OF_FORMAT_1[layout]
    return Row(kind, _dtype_of(facts), tuple(tensors))


def _sha256_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
