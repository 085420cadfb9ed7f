"""Windows of text."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import CorruptFileError, DataNotFoundError, UsageError
from weft.training.datasets import WindowDataset
from weft.training.datasets.text import encode, pydoc, text


def test_the_vocabulary_is_in_order_of_code_point() -> None:
    tokens, size = encode("zä b\U0001f600")
    assert (tokens.tolist(), size) == ([2, 3, 0, 1, 4], 5)


@given(st.integers(0, 60), st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_windows_tile_the_text_and_targets_are_one_ahead(num_tokens: int, sequence_length: int) -> None:
    dataset = WindowDataset(torch.arange(num_tokens), sequence_length)
    batch = dataset.take(torch.arange(len(dataset)))
    assert batch.inputs[0].flatten().tolist() == list(range(len(dataset) * sequence_length))
    assert torch.equal(batch.targets[0], batch.inputs[0] + 1)
    assert num_tokens - 1 - batch.inputs[0].numel() < sequence_length, "a whole window was left out"


def test_a_text_file_is_cut_by_position(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(("a" * 180 + "b" * 10 + "c\r\n" * 3 + "é").encode())
    splits = text(path=str(tmp_path / "book.txt"), sequence_length=4)
    assert splits.task.input.shape == (4,) and splits.task.input.dtype == torch.int64
    assert splits.task.num_outputs == 6  # line ends are kept as they are
    assert splits.train.take(torch.arange(len(splits.train))).inputs[0].unique().tolist() == [2]
    assert splits.validation.take(torch.arange(2)).targets[0].unique().tolist() == [3]


def test_pydoc_reads_like_the_reference_of_python() -> None:
    splits = pydoc()
    batch = splits.train.take(torch.tensor([0, 5]))
    assert batch.inputs[0].shape == (2, 64) and batch.inputs[0].dtype == batch.targets[0].dtype == torch.int64
    assert torch.equal(batch.inputs[0][:, 1:], batch.targets[0][:, :-1])
    sizes = [len(part) for part in (splits.train, splits.validation, splits.test)]
    assert sizes[0] > 5000 and sizes[0] / sum(sizes) == pytest.approx(0.9, abs=0.01)
    assert 90 < splits.task.num_outputs < 200
    assert splits.checksum() == pydoc(sequence_length=32).checksum()


def test_a_text_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 99)
    with pytest.raises(UsageError, match="characters: 99, needed: 100"):
        text(path=str(tmp_path / "short.txt"), sequence_length=4)
    (tmp_path / "short.txt").write_text("x" * 100)
    assert len(text(path=str(tmp_path / "short.txt"), sequence_length=4).test) == 1


@pytest.mark.parametrize("content", ["", "abc"])
def test_an_empty_text_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "short.txt").write_text(content)
    with pytest.raises(UsageError, match="too short"):
        text(path=str(tmp_path / "short.txt"))


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe")
    with pytest.raises(CorruptFileError, match=r"binary, byte: 3"):
        text(path=str(tmp_path / "binary"))


def test_other_wrong_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="nowhere"):
        text(path=str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="sequence_length: 0"):
        pydoc(sequence_length=0)
