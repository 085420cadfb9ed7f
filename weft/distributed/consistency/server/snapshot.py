"""Snapshots of a shard on disk: from the last one a server that died is restored."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.distributed.consistency.server.protocol import InitHeader
from weft.errors import StorageError

__all__ = ["Snapshot", "read_snapshot", "write_snapshot"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A training on one shard, at a moment. `slots` are the optimizer's, by piece and name."""

    header: InitHeader
    weights: tuple[Tensor, ...]
    slots: Mapping[str, Mapping[str, Tensor]]
    buffers: tuple[Tensor, ...]
    version: int
    updates: int


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write over the one before, as a whole or not at all."""
    tensors = {f"weight/{index}": tensor for index, tensor in enumerate(snapshot.weights)}
    tensors |= {f"buffer/{index}": tensor for index, tensor in enumerate(snapshot.buffers)}
    for name, slots in snapshot.slots.items():
        tensors |= {f"slot/{name}/{slot}": tensor for slot, tensor in slots.items()}
    about = {"version": snapshot.version, "updates": snapshot.updates}
    metadata = {"header": json.dumps(vars(snapshot.header)), "about": json.dumps(about)}
    scratch = path.with_suffix(".tmp")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch, metadata=metadata)
        os.replace(scratch, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"snapshot could not be written ({path}: {reason}); free space") from error


def read_snapshot(path: Path) -> Snapshot | None:
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
    header = InitHeader.read(json.loads(metadata["header"]))
    weights, buffers = _numbered(tensors, "weight"), _numbered(tensors, "buffer")
    return Snapshot(header, weights, slots, buffers, **json.loads(metadata["about"]))


def _numbered(tensors: Mapping[str, Tensor], kind: str) -> tuple[Tensor, ...]:
    count = sum(name.startswith(f"{kind}/") for name in tensors)
    return tuple(tensors[f"{kind}/{index}"] for index in range(count))
