"""Handwritten digits that ship with scikit-learn."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from weft.specs import TaskSpec, TensorSpec
from weft.training.datasets.arrays import ArrayDataset
from weft.training.datasets.dataset import Splits
from weft.training.datasets.splitting import cut, fixed_order

__all__ = ["digits"]


def digits() -> Splits:
    """1797 images of 1 x 8 x 8 in [0, 1] and ten classes, cut 7 : 1 : 2 in a fixed random order."""
    rows = torch.from_numpy(_read_rows())
    images, labels = rows[:, :-1].to(torch.float32).reshape(-1, 1, 8, 8) / 16, rows[:, -1].to(torch.int64)
    parts = [ArrayDataset(images[part], labels[part]) for part in cut(fixed_order(len(images)), (7, 1, 2))]
    return Splits("digits", TaskSpec(TensorSpec((1, 8, 8)), 10), *parts)


def _read_rows() -> NDArray[np.float64]:
    """Rows of 64 pixels and a class, read without importing scikit-learn: a second or two of every rank's start."""
    package = find_spec("sklearn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if path is not None and path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # another version may keep it elsewhere

    return np.column_stack(load_digits(return_X_y=True))
