"""Weights of a whole model in plain files, as other tools read and write them: safetensors, and nothing that runs.

model.safetensors                                   one file: names and tensors
folder/                                             as Hugging Face lays models out
  config.json                                       what builds the model
  model.safetensors                                 or, where that would be large,
  model-00001-of-00002.safetensors
  model-00002-of-00002.safetensors
  model.safetensors.index.json                      which tensor is in which of them
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.atomic import storage_error, use_new_folder, write_json
from weft.errors import CorruptFileError, UsageError, nearest

__all__ = ["is_weights", "load_weights", "read_weights", "write_weights"]

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MOST_BYTES = 5 * 10**9
"""Of a file, as Hugging Face cuts them."""
_FORMAT = {"format": "pt"}


def is_weights(path: Path) -> bool:
    """Whether there are weights that `read_weights` reads."""
    return (path.is_file() and path.suffix == ".safetensors") or any((path / f).is_file() for f in (ONE_FILE, INDEX))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, memory-mapped where they lie.

    Raises:
        UsageError: the path is neither a safetensors file nor a folder of them.
        CorruptFileError: a file is missing, cut off or not what its index says.
    """
    if path.is_file() and path.suffix != ".safetensors":
        cure = "write it once with safetensors.torch.save_file(state, 'model.safetensors')"
        raise UsageError(f"file is not of safetensors, and nothing is unpickled ({path}); {cure}")
    if not is_weights(path):
        raise UsageError(f"there are no weights ({path}); give a .safetensors file, or a folder with {ONE_FILE}")
    if path.is_file():
        return dict(_tensors_in(path))
    if not (path / INDEX).is_file():
        return dict(_tensors_in(path / ONE_FILE))
    places = _read_index(path / INDEX)
    files = {file: dict(_tensors_in(path / file)) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise CorruptFileError(f"file lacks a tensor that its index names ({path / file}: {name}); copy it again")
    return {name: files[file][name] for name, file in places.items()}


def write_weights(
    path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, *, most_bytes: int = MOST_BYTES
) -> list[Path]:
    """Write a file if its name ends in .safetensors, else a folder as Hugging Face lays it out; the files.

    Args:
        tensors: each with memory of its own on disk, also where two share it.
        config: for a folder: what builds the model.
        most_bytes: of a file of a folder; a tensor that is larger has one for itself.

    Raises:
        UsageError: there is something at the path already.
        StorageError: it could not be written.
    """
    if path.exists():
        raise UsageError(f"path is taken ({path}); choose another --out")
    if path.suffix == ".safetensors":
        _write_file(path, tensors)
        return [path]
    with use_new_folder(path) as scratch:
        parts = _parts(tensors, most_bytes)
        names = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
        for file, part in zip(names if len(parts) > 1 else [ONE_FILE], parts, strict=True):
            _write_file(scratch / file, {name: tensors[name] for name in part})
        if len(parts) > 1:
            places = {name: file for file, part in zip(names, parts, strict=True) for name in part}
            total = sum(tensor.nbytes for tensor in tensors.values())
            write_json(scratch / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        if config is not None:
            write_json(scratch / CONFIG, dict(config))
    return sorted(path.iterdir())


@torch.no_grad()
def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], where: str = "weights") -> None:
    """Write weights into a module of the same names and shapes, in place; of tied ones, one name is enough.

    Args:
        where: they are from, for an error.

    Raises:
        UsageError: a name or a shape is not that of the module.
    """
    own: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
    for name in tensors:
        if name not in own:
            raise UsageError(f"model has no such tensor ({where}: {name}); {nearest(name, own)}")
    given = {id(own[name]) for name in tensors}
    for name, tensor in own.items():
        if id(tensor) not in given:
            raise UsageError(f"weights lack a tensor of the model ({where}: {name}); give those of this model")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            numbers = f"{where}: {name}, weights: {tuple(tensor.shape)}, model: {tuple(own[name].shape)}"
            raise UsageError(f"tensor has another shape than the model's ({numbers}); give those of this model")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def _tensors_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- no mapping
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"weights cannot be read ({file}: {error}); copy the file again") from error


def _read_index(file: Path) -> dict[str, str]:
    """Names of files are taken as such: none leads out of the folder."""
    try:
        places: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(place, str) and Path(place).name == place for place in places.values()):
            raise ValueError("a file is not in the folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"index of weights cannot be read ({file}: {error}); copy it again") from error
    return places


def _parts(tensors: Mapping[str, Tensor], most_bytes: int) -> Sequence[list[str]]:
    """Names of the tensors of each file, in their order."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += tensor.nbytes
    return parts


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Beside the target, then renamed over it."""
    scratch = path.with_name(f".{path.name}.tmp")
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, scratch, metadata=_FORMAT)
        os.replace(scratch, path)
    except (SafetensorError, OSError) as error:
        scratch.unlink(missing_ok=True)
        raise storage_error(path, error if isinstance(error, OSError) else OSError(str(error))) from error
