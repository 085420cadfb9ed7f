"""Data sets from arrays and .npz files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft.errors import CorruptFileError, DataNotFoundError, UsageError
from weft.training.datasets import ArrayDataset, splits_from_arrays
from weft.training.datasets.arrays import arrays


def some_arrays(num_train: int = 20) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "x_train": random.normal(size=(num_train, 3)),
        "y_train": np.arange(num_train) % 4,
        "x_test": random.normal(size=(5, 3)),
        "y_test": np.array([0, 1, 2, 3, 4]),
    }


def test_a_file_gives_what_its_arrays_give(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **some_arrays())
    from_file, direct = arrays(path=str(tmp_path / "data.npz")), splits_from_arrays(**some_arrays())
    assert from_file.checksum() == direct.checksum()
    assert from_file.task.input.shape == (3,) and from_file.task.input.dtype == torch.float32
    assert from_file.task.num_outputs == 5  # class 4 is in the test part only


def test_a_tenth_is_set_aside_without_overlap_or_loss() -> None:
    given = some_arrays()
    splits = splits_from_arrays(**given)
    assert (len(splits.train), len(splits.validation)) == (18, 2)
    parts = [part.take(torch.arange(len(part))).inputs[0] for part in (splits.train, splits.validation)]
    rows = {tuple(row) for row in torch.cat(parts).tolist()}
    assert rows == {tuple(row) for row in given["x_train"].astype(np.float32).tolist()}


def test_a_given_validation_part_is_used() -> None:
    x, y = np.zeros((2, 3)), np.zeros(2, np.int32)
    splits = splits_from_arrays(**some_arrays(), x_validation=x, y_validation=y)
    assert (len(splits.train), len(splits.validation)) == (20, 2)


def test_regression_targets_keep_a_last_dimension() -> None:
    given = some_arrays() | {"y_train": np.zeros(20), "y_test": np.zeros(5)}
    splits = splits_from_arrays(**given)
    assert splits.train.take(torch.arange(3)).targets[0].shape == (3, 1)
    assert splits.task.num_outputs == 1
    assert splits.train.labels() is None


def test_the_data_set_does_not_share_memory_with_the_caller() -> None:
    given = some_arrays()
    splits = splits_from_arrays(**given)
    before = splits.test.take(torch.arange(5)).inputs[0]
    given["x_test"][:] = 7
    assert torch.equal(splits.test.take(torch.arange(5)).inputs[0], before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"y_train": np.zeros(19)}, "differ in number"),
        ({"x_test": np.zeros((5, 4))}, r"x_train: \(3,\) torch.float32, x_test: \(4,\)"),
        ({"y_test": np.zeros(5)}, "y_train"),
        ({"y_train": np.arange(20) - 1}, "class below zero"),
        ({"x_train": np.zeros((20, 3), complex)}, "complex128"),
        ({"x_train": np.array("text")}, "cannot be trained on"),
        ({"x_train": np.zeros((3, 3)), "y_train": np.zeros(3, int)}, "too few samples"),
    ],
)
def test_wrong_arrays_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        splits_from_arrays(**(some_arrays() | change))


def test_a_file_that_lacks_an_array_is_refused(tmp_path: Path) -> None:
    given = some_arrays()
    np.savez(tmp_path / "data.npz", **given, y_validation=given["y_test"])
    with pytest.raises(UsageError, match="x_validation"):
        arrays(path=str(tmp_path / "data.npz"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    np.savez(file, **some_arrays())
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not an archive"):
        file.write_bytes(content)
        with pytest.raises(CorruptFileError, match=r"data\.npz"):
            arrays(path=str(file))


def test_a_single_array_file_is_not_an_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(CorruptFileError, match=r"one\.npy"):
        arrays(path=str(tmp_path / "one.npy"))


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **some_arrays() | {"x_train": np.array([{}], object)})
    with pytest.raises(CorruptFileError, match="plain arrays"):
        arrays(path=str(tmp_path / "data.npz"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"nowhere\.npz"):
        arrays(path=str(tmp_path / "nowhere.npz"))


def test_the_checksum_sees_values_shape_and_type() -> None:
    zeros, classes = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    changed = zeros.clone()
    changed[3, 1] = 1
    variants = [
        ArrayDataset(zeros, classes),
        ArrayDataset(changed, classes),
        ArrayDataset(zeros.reshape(4, 2, 1), classes),
        ArrayDataset(zeros.to(torch.int32), classes),
    ]
    assert len({dataset.checksum() for dataset in variants}) == 4
