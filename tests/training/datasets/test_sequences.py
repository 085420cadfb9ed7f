"""Sequences of different lengths."""

import pytest
import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.specs import IGNORED
from weft.training.datasets import SequenceDataset
from weft.training.datasets.sequences import pydoc_topics


def test_a_batch_is_padded_to_its_longest_sequence() -> None:
    dataset = SequenceDataset([torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2]), torch.arange(9)])
    batch = dataset.take(torch.tensor([1, 0]))
    assert batch.inputs[0].tolist() == [[1, 0, 0], [5, 6, 7]]
    assert batch.targets[0].tolist() == [[2, IGNORED, IGNORED], [6, 7, 8]]
    assert dataset.lengths().tolist() == [3, 1, 8]


def test_cross_entropy_leaves_the_padding_out() -> None:
    batch = SequenceDataset([torch.tensor([1, 2]), torch.tensor([0, 1, 2, 0])]).take(torch.arange(2))
    logits = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
    padded = F.cross_entropy(logits.flatten(0, 1), batch.targets[0].flatten())
    places = [logits[0, :1], logits[1]]
    plain = F.cross_entropy(torch.cat(places), torch.tensor([2, 1, 2, 0]))
    assert torch.equal(padded, plain)


def test_a_sequence_without_a_next_token_is_refused() -> None:
    with pytest.raises(UsageError, match="tokens: 1"):
        SequenceDataset([torch.tensor([1, 2]), torch.tensor([1])])


def test_the_checksum_sees_where_sequences_end() -> None:
    one, other = ([torch.arange(2), torch.arange(3)], [torch.arange(3), torch.arange(2)])
    assert SequenceDataset(one).checksum() != SequenceDataset(other).checksum()


def test_pydoc_paragraphs_differ_in_length_and_none_is_too_long() -> None:
    splits = pydoc_topics(max_length=100)
    lengths = splits.train.lengths()
    assert lengths is not None and lengths.max() == 100 and lengths.min() < 10 and len(lengths.unique()) > 50
    longest = splits.train.take(lengths.argmax().reshape(1))
    assert longest.inputs[0].shape == (1, *splits.task.input.shape)
    assert int(longest.inputs[0].max()) < splits.task.num_outputs
    assert len(splits.train) > 10 * len(splits.validation) > 0 < len(splits.test)


def test_a_length_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="max_length: 0"):
        pydoc_topics(max_length=0)
