"""Snapshots of a shard on disk: from the last one a server that died is restored."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.distributed.consistency.server.protocol import InitHeader
from weft.distributed.consistency.server.shard import Shard
from weft.errors import StorageError

__all__ = ["Kept", "Recalled", "keep", "recall"]


@dataclass(frozen=True)
class Kept:
    """What is worth keeping of a training on one shard."""

    header: InitHeader
    shard: Shard
    buffers: Sequence[Tensor]


@final
@dataclass(frozen=True)
class Recalled:
    """What was kept, read back."""

    header: InitHeader
    weights: tuple[Tensor, ...]
    slots: dict[str, dict[str, Tensor]]
    buffers: tuple[Tensor, ...]
    version: int
    updates: int


def keep(path: Path, kept: Kept) -> None:
    """Write a snapshot over the one before, as a whole or not at all."""
    tensors = {f"weight/{index}": tensor for index, tensor in enumerate(kept.shard.weights)}
    tensors |= {f"buffer/{index}": tensor.contiguous() for index, tensor in enumerate(kept.buffers)}
    for name, slots in kept.shard.state.slots.items():
        tensors |= {f"slot/{name}/{slot}": tensor.contiguous() for slot, tensor in slots.items()}
    about = {"version": kept.shard.version, "updates": int(kept.shard.state.shared.step)}
    metadata = {"header": json.dumps(kept.header.to_json()), "about": json.dumps(about)}
    scratch = path.with_suffix(".tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, metadata=metadata)
        os.replace(scratch, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"snapshot could not be written ({path}: {reason}); free space") from error


def recall(path: Path) -> Recalled | None:
    """The last snapshot; None where there is none that is whole."""
    try:
        with safe_open(path, "pt") as file:
            metadata: Mapping[str, str] = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- not a mapping
    except (FileNotFoundError, SafetensorError):
        return None
    slots: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("slot/"):
            _, index, slot = name.split("/", 2)
            slots.setdefault(index, {})[slot] = tensor
    return Recalled(
        header=InitHeader.read(json.loads(metadata["header"])),
        weights=_numbered(tensors, "weight"),
        slots=slots,
        buffers=_numbered(tensors, "buffer"),
        **json.loads(metadata["about"]),
    )


def _numbered(tensors: Mapping[str, Tensor], kind: str) -> tuple[Tensor, ...]:
    count = sum(name.startswith(f"{kind}/") for name in tensors)
    return tuple(tensors[f"{kind}/{index}"] for index in range(count))
