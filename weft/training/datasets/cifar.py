"""CIFAR-10 and CIFAR-100, from the binary files on this machine."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import CorruptFileError
from weft.training.datasets.augmentation import Augmented
from weft.training.datasets.dataset import Splits
from weft.training.datasets.pixels import splits_from_pixels
from weft.training.datasets.places import FileSet, cache_folder

__all__ = ["cifar10", "cifar10_files", "cifar100", "cifar100_files"]

SHAPE = (3, 32, 32)
NUM_PIXELS = 3 * 32 * 32


def cifar10_files() -> FileSet:
    batches = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
    return FileSet("cifar10", (*batches, "test_batch.bin"), _cure("cifar10", "cifar-10"), ("cifar-10-batches-bin",))


def cifar100_files() -> FileSet:
    return FileSet("cifar100", ("train.bin", "test.bin"), _cure("cifar100", "cifar-100"), ("cifar-100-binary",))


def cifar10(*, augment: bool = True, augment_seed: int = 0, limit: int | None = None) -> Splits:
    """45000 training, 5000 validation and 10000 test images of 3 x 32 x 32 in ten classes."""
    *batches, test = cifar10_files().find().values()
    splits = splits_from_pixels(
        "cifar10",
        _read_alike(batches),
        _read(test, label_bytes=1, num_classes=10),
        num_classes=10,
        validation_share=10,
        limit=limit,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )
    return _augment(splits, augment_seed) if augment else splits


def cifar100(*, augment: bool = True, augment_seed: int = 0, limit: int | None = None) -> Splits:
    """The same sizes in a hundred classes: the fine label of every image."""
    train, test = (_read(file, label_bytes=2, num_classes=100) for file in cifar100_files().find().values())
    splits = splits_from_pixels(
        "cifar100",
        train,
        test,
        num_classes=100,
        validation_share=10,
        limit=limit,
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    )
    return _augment(splits, augment_seed) if augment else splits


def _read_alike(batches: Sequence[Path]) -> tuple[Tensor, Tensor]:
    pixels, classes = zip(*(_read(batch, label_bytes=1, num_classes=10) for batch in batches), strict=True)
    sizes = [len(part) for part in classes]
    if min(sizes) < max(sizes):
        raise _corrupt(batches[sizes.index(min(sizes))], f"{max(sizes)} samples as in other batches", f"{min(sizes)}")
    return torch.cat(pixels), torch.cat(classes)


def _read(path: Path, *, label_bytes: int, num_classes: int) -> tuple[Tensor, Tensor]:
    # A record is its labels (CIFAR-100: coarse, then fine), then 1024 red, 1024 green and 1024 blue bytes.
    record = label_bytes + NUM_PIXELS
    data = bytearray(path.read_bytes())
    if not data or len(data) % record:
        raise _corrupt(path, f"a multiple of {record} bytes", f"{len(data)} bytes")
    records = torch.frombuffer(data, dtype=torch.uint8).reshape(-1, record)
    classes = records[:, label_bytes - 1].to(torch.int64)
    if int(classes.max()) >= num_classes:
        raise _corrupt(path, f"labels below {num_classes}", f"label {int(classes.max())}")
    return records[:, label_bytes:].reshape(-1, *SHAPE), classes


def _augment(splits: Splits, seed: int) -> Splits:
    return replace(splits, train=Augmented(splits.train, seed))


def _corrupt(path: Path, expected: str, found: str) -> CorruptFileError:
    return CorruptFileError(
        f"CIFAR file is damaged (file: {path}, expected: {expected}, found: {found}); fetch it again"
    )


def _cure(name: str, archive: str) -> str:
    folder = shlex.quote(str(cache_folder() / name))
    url = f"https://www.cs.toronto.edu/~kriz/{archive}-binary.tar.gz"
    fetch = f"mkdir -p {folder} && curl -fL {url} | tar -xz --strip-components=1 -C {folder}"
    return f"{fetch}, or make pictures up: --set data=gratings"
