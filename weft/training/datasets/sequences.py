"""Token sequences of different lengths."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.errors import UsageError
from weft.specs import IGNORED, Batch, TaskSpec, TensorSpec
from weft.training.datasets.checksum import checksum_of
from weft.training.datasets.dataset import AbstractDataset, Splits
from weft.training.datasets.splitting import cut
from weft.training.datasets.text import encode, pydoc_text

__all__ = ["SequenceDataset", "pydoc_topics"]


class SequenceDataset(AbstractDataset):
    """Sequences of tokens; the target of each token is the one after it.

    A batch is as wide as its longest sequence. The others end in token 0, and there the target is -100, which
    cross-entropy leaves out; a model that looks only backwards is not touched by the padding.
    """

    def __init__(self, sequences: Sequence[Tensor]) -> None:
        shortest = min((len(sequence) for sequence in sequences), default=2)
        if shortest < 2:
            raise UsageError(f"sequence without a next token (tokens: {shortest}); leave out those of fewer than two")
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        chosen = [self._sequences[index].long() for index in indices.tolist()]
        if not chosen:
            nothing = torch.empty(0, 1, dtype=torch.int64)
            return Batch((nothing,), (nothing,))
        inputs = pad_sequence([sequence[:-1] for sequence in chosen], batch_first=True)
        targets = pad_sequence([sequence[1:] for sequence in chosen], batch_first=True, padding_value=IGNORED)
        return Batch((inputs,), (targets,))

    def checksum(self) -> str:
        return self._checksum

    def lengths(self) -> Tensor:
        return torch.tensor([len(sequence) - 1 for sequence in self._sequences])

    def num_targets(self, indices: Tensor) -> int:
        return sum(len(self._sequences[index]) - 1 for index in indices.tolist())

    @cached_property
    def _checksum(self) -> str:
        return checksum_of(*self._sequences)


def pydoc_topics(*, max_length: int = 256) -> Splits:
    """The paragraphs of Python's language reference, one sample each; one longer than `max_length` is cut."""
    if max_length < 1:
        raise UsageError(f"paragraphs without characters (max_length: {max_length}); raise max_length")
    paragraphs = [paragraph for topic in pydoc_text().values() for paragraph in topic.split("\n\n")]
    tokens, vocabulary_size = encode("".join(paragraphs))
    whole = tokens.split([len(paragraph) for paragraph in paragraphs])
    pieces = [piece for paragraph in whole for piece in paragraph.split(max_length + 1) if len(piece) > 1]
    parts = [
        SequenceDataset([pieces[place] for place in part.tolist()])
        for part in cut(torch.arange(len(pieces)), (18, 1, 1))
    ]
    return Splits("pydoc_topics", TaskSpec(TensorSpec((max_length,), torch.int64), vocabulary_size), *parts)
