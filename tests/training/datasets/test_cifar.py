"""CIFAR files, and random crops and mirror images."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from weft.errors import CorruptFileError, DataNotFoundError
from weft.specs import Batch
from weft.training.datasets import AbstractDataset, ArrayDataset, Augmented
from weft.training.datasets.cifar import cifar10, cifar100


def record(labels: list[int], red: int) -> bytes:
    return bytes(labels) + bytes([red] * 1024) + bytes([1] * 1024) + bytes([2] * 1024)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def write_cifar10(folder: Path) -> None:
    for number in range(1, 6):
        records = [record([number], red=10 * number + place) for place in range(4)]
        (folder / f"data_batch_{number}.bin").write_bytes(b"".join(records))
    (folder / "test_batch.bin").write_bytes(record([9], red=200))


def test_cifar10_is_read_in_whole(folder: Path) -> None:
    write_cifar10(folder)
    splits = cifar10(augment=False)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [18, 2, 1]
    batch = splits.test.take(torch.tensor([0]))
    assert batch.targets[0].tolist() == [9] and batch.inputs[0].shape == (1, 3, 32, 32)
    red, green, blue = batch.inputs[0][0, :, 0, 0].tolist()
    assert red == pytest.approx((200 / 255 - 0.4914) / 0.2470, rel=1e-5)
    assert green == pytest.approx((1 / 255 - 0.4822) / 0.2435, rel=1e-5)
    assert blue == pytest.approx((2 / 255 - 0.4465) / 0.2616, rel=1e-5)
    assert cifar10().checksum() == splits.checksum()


def test_cifar100_uses_the_fine_label(folder: Path) -> None:
    unpacked = folder / "cifar-100-binary"
    unpacked.mkdir()
    (unpacked / "train.bin").write_bytes(b"".join(record([3, 90 + place], red=place) for place in range(10)))
    (unpacked / "test.bin").write_bytes(record([19, 42], red=7))
    splits = cifar100(limit=4)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [4, 1, 1]
    assert splits.task.num_outputs == 100 and splits.test.take(torch.tensor([0])).targets[0].tolist() == [42]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "expected: a multiple of 3073 bytes, found: 0 bytes"),
        (record([1], red=0)[:-1], "found: 3072 bytes"),
        (record([10], red=0) * 4, "expected: labels below 10, found: label 10"),
        (record([1], red=0) * 3, "expected: 4 samples as in other batches, found: 3"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, content: bytes, text: str) -> None:
    write_cifar10(folder)
    (folder / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(CorruptFileError, match=rf"data_batch_3\.bin, .*{text}"):
        cifar10()


def test_missing_files_have_one_cure(folder: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"cifar-10-binary\.tar\.gz \| tar"):
        cifar10()


def images(num: int = 40) -> ArrayDataset:
    pixels = torch.rand(num, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 1
    return ArrayDataset(pixels, torch.arange(num))


def check_augmentation(dataset: AbstractDataset) -> None:
    """A sample looks the same in any batch and again; another in another epoch; the cached original stays."""
    indices = torch.arange(len(dataset))
    before = dataset.checksum()
    first, again, later = (dataset.take(indices, epoch) for epoch in (0, 0, 1))
    assert torch.equal(first.inputs[0], again.inputs[0]), "differs from call to call"
    assert torch.equal(first.inputs[0][7:9], dataset.take(indices[7:9], 0).inputs[0]), "differs from rank to rank"
    assert not torch.equal(first.inputs[0], later.inputs[0]), "epochs look alike"
    assert dataset.checksum() == before


def test_augmentation_is_a_function_of_epoch_and_index() -> None:
    check_augmentation(Augmented(images(), seed=1))


class PerBatch(AbstractDataset):
    """Planted fault: seeded by the epoch alone, so that a sample's noise depends on its place in the batch."""

    def __len__(self) -> int:
        return 40

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        noise = torch.rand(len(indices), 3, 8, 8, generator=torch.Generator().manual_seed(epoch))
        return Batch((noise,), (indices,))

    def checksum(self) -> str:
        return "0" * 64


@pytest.mark.parametrize(("broken", "reason"), [(PerBatch(), "rank to rank"), (images(), "look alike")])
def test_the_check_catches_planted_faults(broken: AbstractDataset, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_augmentation(broken)


def test_augmentation_leaves_cached_samples_untouched() -> None:
    # A data set that gives out its own memory, as one with a cache does: a review of deep-weather asked for this.
    pixels = torch.rand(4, 3, 8, 8)
    kept = pixels.clone()

    class Cached(AbstractDataset):
        def __len__(self) -> int:
            return 4

        def take(self, indices: Tensor, epoch: int = 0) -> Batch:
            return Batch((pixels,), (indices,))

        def checksum(self) -> str:
            return "0" * 64

    Augmented(Cached()).take(torch.arange(4)).inputs[0].zero_()
    assert torch.equal(pixels, kept)


def test_every_result_is_a_crop_of_the_padded_image_mirrored_or_not() -> None:
    dataset, indices = images(200), torch.arange(200)
    originals, augmented = dataset.take(indices).inputs[0], Augmented(dataset).take(indices).inputs[0]
    padded = torch.nn.functional.pad(originals, (4, 4, 4, 4))
    seen = set()
    for index in range(200):
        for row, column, mirror in torch.cartesian_prod(torch.arange(9), torch.arange(9), torch.arange(2)).tolist():
            crop = padded[index, :, row : row + 8, column : column + 8]
            if torch.equal(crop.flip(-1) if mirror else crop, augmented[index]):
                seen.add((index, row, column, mirror))
    assert {index for index, *_ in seen} == set(range(200))
    assert {row for _, row, _, _ in seen} == {column for _, _, column, _ in seen} == set(range(9))
    assert 70 < sum(mirror for *_, mirror in seen) < 130
