"""Handwritten digits that ship with scikit-learn."""

import torch

from weft.specs import TaskSpec, TensorSpec
from weft.training.datasets.arrays import ArrayDataset
from weft.training.datasets.dataset import Splits
from weft.training.datasets.splitting import cut, fixed_order

__all__ = ["digits"]


def digits() -> Splits:
    """1797 images of 1 x 8 x 8 in [0, 1] and ten classes, cut 7 : 1 : 2 in a fixed random order."""
    from sklearn.datasets import load_digits  # a second of import, for this data set only

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(classes).to(torch.int64)
    parts = [ArrayDataset(images[part], labels[part]) for part in cut(fixed_order(len(images)), (7, 1, 2))]
    return Splits("digits", TaskSpec(TensorSpec((1, 8, 8)), 10), *parts)
