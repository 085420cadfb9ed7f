"""IDX files, and the two data sets that are made of them."""

import gzip
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.errors import CorruptFileError, DataNotFoundError, UsageError
from weft.training.datasets.idx import read_idx
from weft.training.datasets.mnist import FIRST_LABELS, fashion_mnist, fashion_mnist_files, mnist


def idx_bytes(tensor: Tensor) -> bytes:
    header = bytes((0, 0, 8, tensor.ndim)) + struct.pack(f">{tensor.ndim}I", *tensor.shape)
    return header + bytes(tensor.flatten().tolist())


def write_set(folder: Path, num_train: int = 24, labels: list[int] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    classes = torch.arange(num_train) % 10 if labels is None else torch.tensor(labels)
    pixels = torch.arange(num_train * 4).reshape(num_train, 2, 2) % 256
    (folder / "train-images-idx3-ubyte").write_bytes(idx_bytes(pixels))
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(classes)))
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels[:3])))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(classes[:3]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "mnist"


def test_a_tensor_comes_back_compressed_or_not(tmp_path: Path) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    (tmp_path / "plain").write_bytes(idx_bytes(tensor))
    (tmp_path / "packed.gz").write_bytes(gzip.compress(idx_bytes(tensor)))
    assert torch.equal(read_idx(tmp_path / "plain", 3), tensor)
    assert torch.equal(read_idx(tmp_path / "packed.gz", 3), tensor)


WHOLE = idx_bytes(torch.arange(6).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "an empty file"),
        (b"\x00\x00\x0d\x02" + WHOLE[4:], "expected: magic 00000802, found: 00000d02"),
        (idx_bytes(torch.arange(3)), "found: 00000801"),
        (WHOLE[:9], "expected: a header of 12 bytes, found: 9 bytes"),
        (WHOLE[:-1], r"expected: 18 bytes for shape \(2, 3\), found: 17 bytes"),
        (WHOLE + b"\x00", "found: 19 bytes"),
    ],
)
def test_a_damaged_file_says_what_was_expected_and_found(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "file-idx").write_bytes(content)
    with pytest.raises(CorruptFileError, match=text) as caught:
        read_idx(tmp_path / "file-idx", 2)
    assert str(tmp_path / "file-idx") in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not gzip"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: str) -> None:
    packed = gzip.compress(WHOLE)
    flipped = packed[:-8] + bytes([packed[-8] ^ 0xFF]) + packed[-7:]  # in the checksum at the end
    content = {"cut": packed[:-4], "flipped": flipped, "not gzip": WHOLE}[damage]
    (tmp_path / "file.gz").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"file\.gz, expected: a whole gzip file"):
        read_idx(tmp_path / "file.gz", 2)


def test_splits_have_the_training_samples_once(folder: Path) -> None:
    write_set(folder)
    splits = mnist()
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [22, 2, 3]
    assert splits.task.input.shape == (1, 2, 2) and splits.task.num_outputs == 10
    taken = [part.take(torch.arange(len(part))).inputs[0] for part in (splits.train, splits.validation)]
    first_pixels = (torch.cat(taken)[:, 0, 0, 0] * 0.3081 + 0.1307) * 255
    assert first_pixels.round().sort().values.tolist() == [4.0 * index for index in range(24)]


def test_a_limit_keeps_the_first_training_samples(folder: Path) -> None:
    write_set(folder)
    every, few = mnist(), mnist(limit=5)
    assert len(few.train) == 5 and few.validation.checksum() == every.validation.checksum()
    assert torch.equal(few.train.take(torch.arange(5)).inputs[0], every.train.take(torch.arange(5)).inputs[0])
    for limit in (0, 23):
        with pytest.raises(UsageError, match=f"limit: {limit}, samples: 22"):
            mnist(limit=limit)


def test_files_of_the_other_data_set_are_refused(folder: Path) -> None:
    # Both data sets use the same file names, so WEFT_DATA itself may hold either.
    write_set(folder.parent, num_train=30, labels=FIRST_LABELS["fashion_mnist"] * 3)
    assert len(fashion_mnist().test) == 3
    with pytest.raises(CorruptFileError, match="expected: mnist, found: fashion_mnist"):
        mnist()


def test_labels_that_do_not_fit_the_images_are_refused(folder: Path) -> None:
    write_set(folder)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(torch.arange(2)))
    with pytest.raises(CorruptFileError, match="expected: 3 labels, found: 2"):
        mnist()
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(torch.tensor([1, 10, 2])))
    with pytest.raises(CorruptFileError, match="expected: 0 to 9, found: 10"):
        mnist()


def test_a_missing_data_set_has_one_cure(folder: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"looked in: .*mnist.*; curl .*ubyte\.gz'$"):
        mnist()


def test_the_real_fashion_mnist() -> None:
    if not fashion_mnist_files().availability().found:
        pytest.skip(f"Fashion-MNIST is not on this machine; {fashion_mnist_files().cure}")
    splits = fashion_mnist()
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [55_000, 5_000, 10_000]
    labels = splits.test.labels()
    assert labels is not None and labels.bincount().tolist() == [1000] * 10
    images = splits.train.take(torch.arange(2000)).inputs[0]
    assert abs(float(images.mean())) < 0.03 and abs(float(images.std()) - 1) < 0.03
