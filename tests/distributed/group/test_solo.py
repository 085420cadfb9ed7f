"""The group of one rank; its contract is in test_contract.py."""

import torch

from weft.distributed.group import AllReduce, DoneWork, SoloGroup


def test_every_call_is_done_when_it_is_started() -> None:
    work = SoloGroup().start(AllReduce(torch.ones(2)))
    assert isinstance(work, DoneWork) and work.is_done()


def test_a_group_that_follows_another_keeps_its_generation_when_split() -> None:
    group = SoloGroup(generation=3)
    assert (group.generation, group.split(colour=7, key=1).generation) == (3, 3)


def test_results_are_copies() -> None:
    output, tensor = torch.zeros(2, 2), torch.ones(2, 2)
    SoloGroup().all_gather(output, tensor)
    tensor.zero_()
    assert torch.equal(output, torch.ones(2, 2))
