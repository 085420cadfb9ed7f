"""Writing a checkpoint: every rank its own file, all at once; then one of them the index, which makes it one.

    rank 0       folder  | who has what |  its chunks | what was written |  index, rename, older ones go
    rank 1               |              |  its chunks |                  |  trains on
                         gather         rank-*.safetensors, flushed      gather

A tensor that several ranks hold is written by one of them. The folder has another name until it is whole; whoever is
killed on the way leaves the checkpoints before it as they are. Where this very step is on disk already, the new files
lie beside the old ones until the new index takes the place of the old one.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft.atomic import storage_error, sync, use_new_folder
from weft.errors import CorruptFileError, StorageError
from weft.training.checkpoint.entry import ALONE, Ranks, Snapshot
from weft.training.checkpoint.index import (
    INDEX,
    Chunk,
    ChunkedTensor,
    Index,
    Row,
    read_index,
    sha256_of,
    write_index,
)
from weft.training.checkpoint.offers import Offer, assign_writers, cut_out, without_overlaps
from weft.training.checkpoint.part import flat, is_cover
from weft.training.checkpoint.reading import checkpoints_in

__all__ = ["write_checkpoint"]


def write_checkpoint(folder: Path, snapshot: Snapshot, ranks: Ranks = ALONE, *, keep: int = 2) -> Path:
    """Write `folder/step-N` as a whole or not at all, then remove all but it and the `keep - 1` before it. All ranks
    call this, each with what it has; they share the folder.

    Later ones go as well: a run that writes step N again has gone back behind them, because they are damaged.

    Args:
        snapshot: what this rank has; its progress counts on rank 0 alone.
        ranks: who saves together; by default this rank alone.
        keep: checkpoints that stay, this one among them.

    Raises:
        StorageError: on all ranks if a rank's file could not be written, on rank 0 if the index could not.
    """
    path = folder / f"step-{snapshot.step:010d}"
    if ranks.mesh.rank > 0:
        _write_chunks(snapshot, ranks, path, "")
        return path
    with _use_target(path) as (target, suffix):
        written = _write_chunks(snapshot, ranks, target, suffix)
        write_index(target, Index(snapshot.step, snapshot.progress, _rows(written)))
    _remove_others(folder, path, keep)
    return path


def _write_chunks(snapshot: Snapshot, ranks: Ranks, target: Path, suffix: str) -> dict[Offer, Chunk | None]:
    """Agree on who writes what, write this rank's share, and wait for the others: all chunks, and where they are now.
    An empty one is nowhere.

    Args:
        target, suffix: where to write, as rank 0 says.
    """
    rank = ranks.mesh.rank
    own = _offers(snapshot, ranks.mesh.replica)
    said = ranks.gather_json(
        {"rank": rank, "target": target.name, "suffix": suffix, "offers": [offer.to_json() for offer in own]}
    )
    if said[0]["rank"] != 0:
        return {}  # ranks that do not meet: rank 0 writes alone
    target, suffix = target.parent / said[0]["target"], said[0]["suffix"]
    offers = without_overlaps({one["rank"]: [Offer.from_json(offer) for offer in one["offers"]] for one in said})
    writers = assign_writers({rank: [*chunks] for rank, chunks in offers.items()})
    mine = {
        chunk.key: _on_host(cut_out(own[offer], offer, chunk))
        for chunk, offer in offers[rank].items()
        if writers[chunk] == rank and chunk.num_bytes
    }
    failure: StorageError | None = None
    try:
        _save(mine, target / _file_of(rank, suffix))
    except StorageError as error:
        failure = error
    checksums_of_own = {key: sha256_of(tensor) for key, tensor in mine.items()}
    written = ranks.gather_json({"failure": str(failure or ""), "checksums": checksums_of_own})
    if failures := [one["failure"] for one in written if one["failure"]]:
        raise failure or StorageError(failures[0])
    checksums = {rank: one["checksums"] for rank, one in zip(offers, written, strict=True)}
    return {
        offer: Chunk(offer.part, _file_of(writers[offer], suffix), offer.key, checksums[writers[offer]][offer.key])
        if offer.num_bytes
        else None
        for offered in offers.values()
        for offer in offered
    }


def _offers(snapshot: Snapshot, replica: int) -> dict[Offer, Tensor]:
    """Every part that this rank has, as a view; of a tensor of which it has nothing, an empty one."""
    offers: dict[Offer, Tensor] = {}
    for name, entry in snapshot.entries.items():
        owner = replica if entry.replica is None else entry.replica
        about = name, entry.kind, entry.tensor.dtype, entry.shape, None if entry.kind == "global" else owner
        offers |= {Offer(*about, held.part): held.of(entry.tensor.detach()) for held in entry.parts}
        if not entry.parts:
            offers[Offer(*about, flat(0, 0))] = entry.tensor.detach().reshape(-1)
    return offers


def _on_host(tensor: Tensor) -> Tensor:
    """A copy, for safetensors refuses tensors that share memory (tied or viewed)."""
    host = tensor.detach().cpu()
    is_copy = host.device != tensor.device
    return host.contiguous() if is_copy else host.clone(memory_format=torch.contiguous_format)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a rank's file and flush it; none if it has nothing to write."""
    if not file.parent.is_dir():
        raise StorageError(f"rank does not see the folder of the checkpoint ({file}); give all ranks one shared --out")
    try:
        if tensors:
            save_file(tensors, file)
            sync(file)
    except SafetensorError as error:  # a full disk among others: safetensors does not raise OSError
        raise storage_error(file, OSError(str(error))) from error
    except OSError as error:
        raise storage_error(file, error) from error


def _rows(written: Mapping[Offer, Chunk | None]) -> dict[str, Row]:
    """The rows of the index, in the order in which ranks named them."""
    by_name: dict[str, dict[int, list[Offer]]] = {}
    for offer in written:
        by_name.setdefault(offer.name, {}).setdefault(offer.owner or 0, []).append(offer)
    rows = {}
    for name, by_owner in by_name.items():
        kinds = {(offer.kind, offer.dtype) for same in by_owner.values() for offer in same}
        assert len(kinds) == 1, f"ranks do not have the same kind of {name}"
        (kind, dtype), owners = kinds.pop(), sorted(by_owner)
        rows[name] = Row(kind, dtype, tuple(_chunked(by_owner[owner], written) for owner in owners))
    return rows


def _chunked(offers: Sequence[Offer], written: Mapping[Offer, Chunk | None]) -> ChunkedTensor:
    """One tensor, whose chunks must cover it."""
    name, shapes = offers[0].name, {offer.shape for offer in offers}
    assert len(shapes) == 1, f"ranks do not have the same shape of {name}"
    chunks = tuple(chunk for offer in offers if (chunk := written[offer]))
    assert is_cover([chunk.part for chunk in chunks], offers[0].shape), f"ranks do not hold {name} once"
    return ChunkedTensor(offers[0].shape, chunks)


def _file_of(rank: int, suffix: str) -> str:
    return f"rank-{rank:05d}{suffix}.safetensors"


@contextmanager
def _use_target(path: Path) -> Iterator[tuple[Path, str]]:
    """Where rank 0 has the files written, and what is added to their names."""
    if not _files_of(path):
        with use_new_folder(path) as scratch:
            yield scratch, ""
            shutil.rmtree(path, ignore_errors=True)  # without an index it is no checkpoint
        return
    try:
        yield path, f"-{token_hex(4)}"
    finally:
        known = _files_of(path)
        for file in path.iterdir():
            if file.name not in known:
                file.unlink()


def _files_of(path: Path) -> set[str]:
    """The files of a checkpoint by its index; none if that cannot be read."""
    try:
        rows = read_index(path).rows.values()
    except CorruptFileError:
        return set()
    return {INDEX} | {chunk.file for row in rows for tensor in row.tensors for chunk in tensor.chunks}


def _remove_others(folder: Path, path: Path, keep: int) -> None:
    """Remove all checkpoints but this and those just before it, and what was left by a process that was killed."""
    kept = [found for found in checkpoints_in(folder) if found <= path][-keep:]
    for found in (*checkpoints_in(folder), *folder.glob(".step-*.tmp")):
        if found not in kept:
            shutil.rmtree(found, ignore_errors=True)
