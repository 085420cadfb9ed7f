"""MNIST and Fashion-MNIST, from IDX files on this machine."""

import shlex
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import CorruptFileError
from weft.training.datasets.dataset import Splits
from weft.training.datasets.idx import read_idx
from weft.training.datasets.pixels import splits_from_pixels
from weft.training.datasets.places import FileSet, cache_folder

__all__ = ["fashion_mnist", "fashion_mnist_files", "mnist", "mnist_files"]

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# Both data sets use the same file names; their first training labels tell them apart.
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}


def mnist_files() -> FileSet:
    url = "https://ossci-datasets.s3.amazonaws.com/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"
    folder = shlex.quote(str(cache_folder() / "mnist"))
    cure = f"curl -fL --create-dirs --output-dir {folder} --remote-name-all '{url}'"
    return FileSet("mnist", FILES, cure, folders=("MNIST/raw",), suffixes=("", ".gz"))


def fashion_mnist_files() -> FileSet:
    return FileSet(
        "fashion_mnist",
        FILES,
        "sudo apt install dataset-fashion-mnist",
        folders=("fashion-mnist", "FashionMNIST/raw"),
        system=("/usr/share/datasets/fashion-mnist",),
        suffixes=("", ".gz"),
    )


def mnist(*, limit: int | None = None) -> Splits:
    """Handwritten digits: 55000 training, 5000 validation and 10000 test images of 1 x 28 x 28, ten classes."""
    return _load(mnist_files().find(), "mnist", limit=limit, mean=0.1307, std=0.3081)


def fashion_mnist(*, limit: int | None = None) -> Splits:
    """Articles of clothing, in the shape of MNIST."""
    return _load(fashion_mnist_files().find(), "fashion_mnist", limit=limit, mean=0.2860, std=0.3530)


def _load(files: Mapping[str, Path], name: str, *, limit: int | None, mean: float, std: float) -> Splits:
    train, test = _read_pair(files, "train"), _read_pair(files, "t10k")
    opening = train[1][:10].tolist()
    for other, labels in FIRST_LABELS.items():
        if other != name and opening == labels:
            folder = files[FILES[0]].parent
            raise CorruptFileError(
                f"files belong to another data set (folder: {folder}, expected: {name}, found: {other}); "
                f"move them to a folder named {other}"
            )
    return splits_from_pixels(
        name, train, test, num_classes=10, validation_share=12, limit=limit, mean=(mean,), std=(std,)
    )


def _read_pair(files: Mapping[str, Path], part: str) -> tuple[Tensor, Tensor]:
    image_file, label_file = files[f"{part}-images-idx3-ubyte"], files[f"{part}-labels-idx1-ubyte"]
    pixels, classes = read_idx(image_file, 3).unsqueeze(1), read_idx(label_file, 1).to(torch.int64)
    if len(pixels) != len(classes):
        raise CorruptFileError(
            f"IDX files do not belong together (file: {label_file}, expected: {len(pixels)} labels, "
            f"found: {len(classes)}); fetch both again"
        )
    if len(classes) and int(classes.max()) > 9:
        raise CorruptFileError(
            f"IDX file has a label out of range (file: {label_file}, expected: 0 to 9, found: {int(classes.max())}); "
            "fetch it again"
        )
    return pixels, classes
