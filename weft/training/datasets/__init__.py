"""Data sets: samples that can be taken by index, and where they come from."""

from weft.training.datasets.arrays import ArrayDataset, splits_from_arrays
from weft.training.datasets.augmentation import Augmented
from weft.training.datasets.catalogue import DATASETS, locate
from weft.training.datasets.dataset import AbstractDataset, DatasetOnDevice, Splits
from weft.training.datasets.places import Availability
from weft.training.datasets.sequences import SequenceDataset
from weft.training.datasets.text import WindowDataset

__all__ = [
    "DATASETS",
    "AbstractDataset",
    "ArrayDataset",
    "Augmented",
    "Availability",
    "DatasetOnDevice",
    "SequenceDataset",
    "Splits",
    "WindowDataset",
    "locate",
    "splits_from_arrays",
]
