"""Data on a device: batches go there, facts stay; `meta` stands for a device that is not the CPU."""

import torch

from weft.specs import CPU
from weft.training.datasets import DatasetOnDevice
from weft.training.datasets.digits import digits

META = torch.device("meta")


def test_batches_are_moved_when_they_are_taken() -> None:
    there = digits().on(META)
    for part in (there.train, there.validation, there.test):
        batch = part.take(torch.arange(3))
        assert {tensor.device for tensor in (*batch.inputs, *batch.targets)} == {META} and len(batch) == 3


def test_facts_about_the_data_stay_on_the_cpu() -> None:
    here = digits()
    there = here.on(META)
    assert here.on(CPU) is here
    assert isinstance(there.train, DatasetOnDevice) and len(there.train) == len(here.train)
    assert there.checksum() == here.checksum()
    own, other = there.train.labels(), here.train.labels()
    assert own is not None and other is not None and own.is_cpu and torch.equal(own, other)
    assert there.train.lengths() is None and not there.train.has_padding()
    assert there.train.num_targets(torch.arange(5)) == here.train.num_targets(torch.arange(5)) == 5
