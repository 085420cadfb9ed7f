"""A folder of images."""

import sys
from pathlib import Path

import pytest
import torch

from weft.errors import CorruptFileError, DataNotFoundError, UsageError
from weft.training.datasets.images import images

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install 'weft[images]'")


def paint(file: Path, colour: tuple[int, int, int], mode: str = "RGB") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), colour).convert(mode).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(5):
        paint(tmp_path / "train" / "red" / f"{number}.png", (255, 10 * number, 0))
        paint(tmp_path / "train" / "blue" / f"{number}.JPG", (0, 10 * number, 255))
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    paint(tmp_path / "train" / ".cache" / "0.png", (0, 0, 0))
    return tmp_path


def test_missing_parts_are_set_aside_from_training(root: Path) -> None:
    splits = images(path=str(root), size=8)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [8, 1, 1]
    assert splits.task.input.shape == (3, 8, 8) and splits.task.num_outputs == 2
    again = images(path=str(root), size=8)
    assert again.checksum() == splits.checksum()
    parts = (splits.train, splits.validation, splits.test)
    labels = torch.cat([part.take(torch.arange(len(part))).targets[0] for part in parts])
    assert labels.bincount().tolist() == [5, 5]


def test_given_parts_are_used(root: Path) -> None:
    paint(root / "test" / "red" / "0.png", (255, 255, 255))
    paint(root / "validation" / "blue" / "0.png", (255, 255, 255))
    splits = images(path=str(root))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [10, 1, 1]
    assert splits.validation.take(torch.tensor([0])).targets[0].tolist() == [0]
    assert splits.test.take(torch.tensor([0])).targets[0].tolist() == [1]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L"])
def test_every_kind_of_image_becomes_colours_in_range(root: Path, mode: str) -> None:
    paint(root / "test" / "red" / "0.png", (255, 255, 255), mode)
    batch = images(path=str(root), size=5).test.take(torch.tensor([0]))
    assert torch.equal(batch.inputs[0], torch.ones(1, 3, 5, 5))


def test_the_label_is_the_folder(root: Path) -> None:
    train = images(path=str(root)).train
    batch = train.take(torch.arange(len(train)))
    is_red = batch.inputs[0][:, 0].mean(dim=(1, 2)) > 0
    assert torch.equal(batch.targets[0], is_red.long())  # blue is 0, red is 1: by name
    labels = train.labels()
    assert labels is not None and torch.equal(labels, batch.targets[0])


def test_the_checksum_follows_the_content_and_not_the_place(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = images(path=str(root)).checksum()
    moved = root.rename(tmp_path_factory.mktemp("elsewhere") / "moved")
    assert images(path=str(moved)).checksum() == before
    paint(moved / "train" / "red" / "0.png", (1, 2, 3))
    assert images(path=str(moved)).checksum() != before


@pytest.mark.parametrize("content", [b"", b"not an image"])
def test_a_damaged_image_is_named(root: Path, content: bytes) -> None:
    file = root / "test" / "red" / "bad.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"bad\.png"):
        images(path=str(root)).test.take(torch.tensor([0]))


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_truncated_image_is_named(root: Path, ending: str) -> None:
    file = root / "test" / "red" / f"cut.{ending}"
    paint(file, (9, 9, 9))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CorruptFileError, match="cut"):
        images(path=str(root)).test.take(torch.tensor([0]))


def test_a_class_without_training_images_is_refused(root: Path) -> None:
    paint(root / "test" / "rde" / "0.png", (0, 0, 0))
    with pytest.raises(UsageError, match="did you mean 'red'"):
        images(path=str(root))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="train/<class>"):
        images(path=str(tmp_path))
    with pytest.raises(DataNotFoundError, match="nowhere"):
        images(path=str(tmp_path / "nowhere"))


def test_a_machine_without_pillow_is_told_the_cure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"pip install 'weft\[images\]'"):
        images(path=str(root))
