"""Text as characters: windows of equal length, each to be continued by one character at every place."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.errors import CorruptFileError, UsageError
from weft.specs import Batch, TaskSpec, TensorSpec
from weft.training.datasets.checksum import checksum_of
from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.places import find_user_file
from weft.training.datasets.splitting import cut

__all__ = ["WindowDataset", "encode", "pydoc", "pydoc_text", "text"]

SHARES = (18, 1, 1)  # 90%, 5% and 5%


class WindowDataset(AbstractDataset):
    """Consecutive windows of a token sequence; the target of each token is the one after it.

    tokens    a b c d e f g h      sequence_length 3: inputs abc def, targets bcd efg
    """

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence_length

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        places = indices[:, None] * self._sequence_length + torch.arange(self._sequence_length)
        return Batch((self._tokens[places].long(),), (self._tokens[places + 1].long(),))

    def checksum(self) -> str:
        return self._checksum

    @cached_property
    def _checksum(self) -> str:
        return checksum_of(self._tokens)


def text(*, path: str, sequence_length: int = 64) -> Splits:
    """Any UTF-8 text file, cut by position into 90% training, 5% validation and 5% test text."""
    file = find_user_file("text", path)
    try:
        return _windows("text", file.read_bytes().decode("utf-8"), sequence_length)
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            f"file is not UTF-8 text (file: {file}, byte: {error.start}, found: {error.reason}); convert it with iconv"
        ) from error


def pydoc(*, sequence_length: int = 64) -> Splits:
    """The reference of the Python language, as shipped with this interpreter: half a million characters."""
    return _windows("pydoc", "".join(pydoc_text().values()), sequence_length)


def pydoc_text() -> dict[str, str]:
    """The text of every topic of Python's `help()`, in the order of their names."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def encode(corpus: str) -> tuple[Tensor, int]:
    """The corpus as token ids (int32) and the size of its vocabulary: its characters in order of code point.

    >>> encode("banana")
    (tensor([1, 0, 2, 0, 2, 0], dtype=torch.int32), 3)
    """
    code_points = np.frombuffer(corpus.encode("utf-32-le"), np.uint32)
    vocabulary, ids = np.unique(code_points, return_inverse=True)
    return torch.from_numpy(ids.astype(np.int32)), len(vocabulary)


def _windows(name: str, corpus: str, sequence_length: int) -> Splits:
    if sequence_length < 1:
        raise UsageError(f"window without characters (sequence_length: {sequence_length}); raise sequence_length")
    tokens, vocabulary_size = encode(corpus)
    shortest = (sequence_length + 1) * sum(SHARES)
    if len(tokens) < shortest:
        raise UsageError(
            f"text is too short for a window in every part (characters: {len(tokens)}, needed: {shortest}); "
            "lower sequence_length or give more text"
        )
    parts = [WindowDataset(part, sequence_length) for part in cut(tokens, SHARES)]
    return Splits(name, TaskSpec(TensorSpec((sequence_length,), torch.int64), vocabulary_size), *parts)
