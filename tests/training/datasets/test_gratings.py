"""Made pictures: classes that no pixel tells, and a seed that changes them."""

import pytest
import torch

from weft.errors import UsageError
from weft.training.datasets.gratings import gratings


def test_sizes_and_classes() -> None:
    splits = gratings(num_samples=40, side=12, channels=2, num_classes=4)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (32, 4, 4)
    batch = splits.train.take(torch.arange(8))
    assert batch.inputs[0].shape == (8, 2, 12, 12) and batch.targets[0].tolist() == [0, 1, 2, 3] * 2


def test_a_class_is_a_direction_and_no_mean() -> None:
    """Waves of class 0 run along rows: neighbours above each other are alike, and those beside each other are not."""
    train = gratings(num_samples=400, side=16, channels=1, num_classes=2, seed=3).train
    pictures = train.take(torch.arange(0, 300, 2)).inputs[0].squeeze(1)
    above = (pictures[:, 1:] * pictures[:, :-1]).mean()
    beside = (pictures[:, :, 2:] * pictures[:, :, :-2]).mean()  # half a wave apart
    assert above > 0.05 > -0.05 > beside
    assert abs(float(pictures.mean())) < 0.05


def test_a_seed_makes_other_pictures() -> None:
    assert gratings(num_samples=20, side=4).checksum() == gratings(num_samples=20, side=4).checksum()
    assert gratings(num_samples=20, side=4).checksum() != gratings(num_samples=20, side=4, seed=1).checksum()


def test_no_pictures_are_refused() -> None:
    with pytest.raises(UsageError, match="no such pictures"):
        gratings(side=0)
