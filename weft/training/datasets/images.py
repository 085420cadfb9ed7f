"""A folder of images, one folder per class, decoded when they are taken."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import CorruptFileError, DataNotFoundError, UsageError, nearest
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.pixels import standardise
from weft.training.datasets.places import find_user_folder
from weft.training.datasets.splitting import cut, fixed_order

__all__ = ["PILLOW_CURE", "FolderDataset", "images"]

ENDINGS = (".jpeg", ".jpg", ".png")
PILLOW_CURE = "pip install 'weft[images]'"


class FolderDataset(AbstractDataset):
    """Image files and their classes, given out as RGB of 3 x size x size in [-1, 1]."""

    def __init__(self, files: Sequence[Path], classes: Tensor, size: int) -> None:
        self._files = files
        self._classes = classes
        self._size = size

    def __len__(self) -> int:
        return len(self._files)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        pixels = torch.empty(len(indices), 3, self._size, self._size, dtype=torch.uint8)
        for place, index in enumerate(indices.tolist()):
            pixels[place] = _decode(self._files[index], self._size)
        return Batch((standardise(pixels, (0.5,) * 3, (0.5,) * 3),), (self._classes[indices],))

    def checksum(self) -> str:
        return self._checksum

    def labels(self) -> Tensor:
        return self._classes

    @cached_property
    def _checksum(self) -> str:
        digest = hashlib.sha256()
        for file, label in zip(self._files, self._classes.tolist(), strict=True):
            content = file.read_bytes()
            digest.update(f"{label} {len(content)};".encode())
            digest.update(content)
        return digest.hexdigest()


def images(*, path: str, size: int = 32) -> Splits:
    """`path/train/<class>/*.png` or .jpg, resized to `size` x `size`.

    `path/validation` and `path/test` are used where they exist; for each that does not, a tenth of the training
    images is set aside, the same every time.
    """
    if size < 1:
        raise UsageError(f"images without pixels (size: {size}); raise size")
    _import_pillow()
    root = find_user_folder("images", path)
    files = {part: _list_images(root / part) for part in ("train", "validation", "test")}
    if not files["train"]:
        raise DataNotFoundError(
            f"folder holds no training images (looked for: {root.absolute()}/train/<class>/*.png, *.jpg, *.jpeg); "
            "set the option `path` to the folder that holds `train`"
        )
    names = sorted({file.parent.name for file in files["train"]})
    label_of = {name: label for label, name in enumerate(names)}
    parts = {part: FolderDataset(chosen, _label(chosen, label_of), size) for part, chosen in _fill_parts(files).items()}
    return Splits("images", TaskSpec(TensorSpec((3, size, size)), len(names)), **parts)


def _list_images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("[!.]*/[!.]*") if file.suffix.lower() in ENDINGS)


def _fill_parts(files: Mapping[str, list[Path]]) -> dict[str, list[Path]]:
    absent = [part for part in ("validation", "test") if not files[part]]
    orders = cut(fixed_order(len(files["train"])), (10 - len(absent), *(1 for _ in absent)))
    taken = {
        part: [files["train"][place] for place in order.tolist()]
        for part, order in zip(("train", *absent), orders, strict=True)
    }
    return {**files, **taken}


def _label(files: Sequence[Path], label_of: Mapping[str, int]) -> Tensor:
    for file in files:
        if file.parent.name not in label_of:
            cure = nearest(file.parent.name, label_of)
            raise UsageError(f"class has no training images (folder: {file.parent}); {cure}")
    return torch.tensor([label_of[file.parent.name] for file in files], dtype=torch.int64)


def _decode(file: Path, size: int) -> Tensor:
    pillow = _import_pillow()
    try:
        with pillow.open(file) as image:
            resized = image.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError) as error:
        raise CorruptFileError(f"image cannot be decoded (file: {file}, found: {error}); replace it") from error
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError(
            f"images cannot be decoded without Pillow (package: pillow, missing); {PILLOW_CURE}"
        ) from error
    return Image
