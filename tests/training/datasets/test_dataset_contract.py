"""What every kind of data set promises, and proof that the check can fail."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.specs import Batch
from weft.training.datasets import AbstractDataset, ArrayDataset, Augmented, SequenceDataset, WindowDataset
from weft.training.datasets.pixels import PixelDataset


def pixel_dataset() -> PixelDataset:
    pixels = torch.arange(5 * 3 * 6 * 6).reshape(5, 3, 6, 6).to(torch.uint8)
    return PixelDataset(pixels, torch.tensor([0, 1, 2, 1, 0]), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


KINDS: dict[str, Callable[[], AbstractDataset]] = {
    "arrays": lambda: ArrayDataset(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.arange(5)),
    "augmented": lambda: Augmented(pixel_dataset(), seed=3),
    "pixels": pixel_dataset,
    "sequences": lambda: SequenceDataset([torch.arange(length) for length in (2, 5, 3)]),
    "windows": lambda: WindowDataset(torch.arange(20), sequence_length=4),
}


def check_dataset(dataset: AbstractDataset) -> None:
    """A sample has the same bits alone and in company, now and again, and taking it changes nothing."""
    size = len(dataset)
    order = torch.arange(size - 1, -1, -1)
    before = dataset.checksum()
    batch = dataset.take(order, epoch=2)
    assert len(batch) == size == len(batch.targets[0])
    for place, index in enumerate(order):
        alone = dataset.take(index.reshape(1), epoch=2)
        for one, many in ((alone.inputs[0], batch.inputs[0]), (alone.targets[0], batch.targets[0])):
            same = many[place : place + 1][..., : one.shape[-1]] if one.ndim == 2 else many[place : place + 1]
            assert torch.equal(one, same), "sample depends on its company"
    batch.inputs[0].zero_()
    assert dataset.take(order, epoch=2).inputs[0].any(), "batch is a window on the data set"
    assert len(dataset.take(torch.arange(0))) == 0, "an empty share gives an empty batch"
    assert dataset.checksum() == before and len(before) == 64
    for facts in (dataset.lengths(), dataset.labels()):
        assert facts is None or len(facts) == size


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_data_set_keeps_its_promises(kind: str) -> None:
    check_dataset(KINDS[kind]())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_index_out_of_range_is_refused(kind: str) -> None:
    dataset = KINDS[kind]()
    with pytest.raises(IndexError):
        dataset.take(torch.tensor([len(dataset)]))


class GeneratorAugmented(AbstractDataset):
    """Planted fault: noise from one running generator, so that a sample depends on what was drawn before it."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 3

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        return Batch((torch.rand(len(indices), 4, 1, generator=self._generator),), (indices,))

    def checksum(self) -> str:
        return "0" * 64


class Aliased(AbstractDataset):
    """Planted fault: gives out its own memory."""

    def __init__(self) -> None:
        self._inputs = torch.ones(3, 1, 1)

    def __len__(self) -> int:
        return 3

    def take(self, indices: Tensor, epoch: int = 0) -> Batch:
        return Batch((self._inputs[: len(indices)],), (torch.zeros(len(indices)),))

    def checksum(self) -> str:
        return "0" * 64


@pytest.mark.parametrize(("broken", "reason"), [(GeneratorAugmented(), "company"), (Aliased(), "window")])
def test_the_check_catches_planted_faults(broken: AbstractDataset, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        check_dataset(broken)
