"""Data sets that are tensors in memory, and NumPy files of them."""

import zipfile
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import CorruptFileError, UsageError
from weft.specs import IGNORED, Batch, TaskSpec, TensorSpec
from weft.training.datasets.checksum import checksum_of
from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.places import find_user_file
from weft.training.datasets.splitting import cut, fixed_order

__all__ = ["ArrayDataset", "arrays", "splits_from_arrays"]

Array = Tensor | NDArray[np.generic]


class ArrayDataset(AbstractDataset):
    """Inputs and targets that are indexed by sample along dimension 0."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        _check_number(inputs, targets)
        self._inputs = inputs
        self._targets = targets

    def __len__(self) -> int:
        return len(self._inputs)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        return Batch((self._inputs[indices],), (self._targets[indices],))

    def checksum(self) -> str:
        return self._checksum

    def labels(self) -> Tensor | None:
        is_class = self._targets.ndim == 1 and not self._targets.is_floating_point()
        return self._targets if is_class else None

    def has_padding(self) -> bool:
        return self._has_padding

    def num_targets(self, indices: Tensor) -> int:
        is_number = self._targets.is_floating_point()
        return len(indices) if is_number else int((self._targets[indices] != IGNORED).sum())

    @cached_property
    def _has_padding(self) -> bool:
        return not self._targets.is_floating_point() and bool((self._targets == IGNORED).any())

    @cached_property
    def _checksum(self) -> str:
        return checksum_of(self._inputs, self._targets)


def arrays(*, path: str) -> Splits:
    """An .npz file with x_train, y_train, x_test, y_test and, if it likes, x_validation and y_validation."""
    file = find_user_file("arrays", path)
    content = _read_npz(file)
    parts = ("train", "test", "validation") if {"x_validation", "y_validation"} & set(content) else ("train", "test")
    wanted = [f"{kind}_{part}" for part in parts for kind in "xy"]
    missing = [name for name in wanted if name not in content]
    if missing:
        raise UsageError(f"array is missing from the file (file: {file}, array: {missing[0]}); save it with np.savez")
    return splits_from_arrays(**{name: content[name] for name in wanted})


def splits_from_arrays(
    x_train: Array,
    y_train: Array,
    x_test: Array,
    y_test: Array,
    x_validation: Array | None = None,
    y_validation: Array | None = None,
) -> Splits:
    """Splits of arrays (samples along dimension 0): integer targets are classes, others are regressed.

    Floating-point arrays become float32, integers int64. Without a validation part, a tenth of the training samples
    is set aside for it, the same tenth every time.

    Args:
        x_train: samples to train on; `y_train` are their targets, and so for the other parts.
        x_validation: samples to evaluate on while it trains; None to set some of the training samples aside.
    """
    x, y = _as_inputs(x_train), _as_targets(y_train)
    _check_number(x, y)
    parts = {"train": (x, y), "test": (_as_inputs(x_test), _as_targets(y_test))}
    if x_validation is not None and y_validation is not None:
        parts["validation"] = (_as_inputs(x_validation), _as_targets(y_validation))
    else:
        kept, aside = cut(fixed_order(len(x)), (9, 1))
        parts |= {"train": (x[kept], y[kept]), "validation": (x[aside], y[aside])}
    _check_alike(parts)
    task = TaskSpec(TensorSpec(tuple(x.shape[1:]), x.dtype), _num_outputs([y for _, y in parts.values()]))
    return Splits("arrays", task, **{part: ArrayDataset(x, y) for part, (x, y) in parts.items()})


def _read_npz(file: Path) -> Mapping[str, NDArray[np.generic]]:
    try:
        with file.open("rb") as handle, np.load(handle, allow_pickle=False) as content:
            return dict(content)
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptFileError(
            f"file is not a whole .npz of plain arrays (file: {file}, found: {error}); write it again with np.savez"
        ) from error


def _as_inputs(array: Array) -> Tensor:
    values = np.asarray(array)
    if values.ndim == 0 or values.dtype.kind not in "fiu":
        raise UsageError(
            f"array that cannot be trained on (type: {values.dtype}, shape: {values.shape}); "
            "give floats or integers with samples along dimension 0"
        )
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64, order="C"))


def _as_targets(array: Array) -> Tensor:
    targets = _as_inputs(array)
    if targets.is_floating_point():
        # A loss would broadcast (samples,) against predictions of (samples, 1) without a word.
        return targets.unsqueeze(1) if targets.ndim == 1 else targets
    wrong = targets[(targets < 0) & (targets != IGNORED)]
    if len(wrong):
        raise UsageError(f"class below zero (class: {int(wrong[0])}); number the classes from 0")
    return targets


def _check_number(inputs: Tensor, targets: Tensor) -> None:
    if len(inputs) != len(targets):
        raise UsageError(
            f"inputs and targets differ in number (inputs: {len(inputs)}, targets: {len(targets)}); "
            "give one target per input"
        )


def _check_alike(parts: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    for part, pair in parts.items():
        for kind, tensor, first in zip("xy", pair, parts["train"], strict=True):
            if (tensor.shape[1:], tensor.dtype) != (first.shape[1:], first.dtype):
                raise UsageError(
                    f"samples of two parts differ ({kind}_train: {tuple(first.shape[1:])} {first.dtype}, "
                    f"{kind}_{part}: {tuple(tensor.shape[1:])} {tensor.dtype}); give them one shape and type"
                )


def _num_outputs(targets: list[Tensor]) -> int:
    if targets[0].is_floating_point():
        return targets[0].shape[-1]
    return max((int(part.max()) for part in targets if part.numel()), default=-1) + 1
