"""Staging, as far as it shows without an accelerator; tests/stand_in has the rest."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.distributed.group import AllReduce, Barrier, Broadcast, RecordingGroup, Send, SoloGroup
from weft.distributed.group.staged import StagedGroup, is_on_cpu, map_tensors
from weft.distributed.group.two_sided import TwoSidedGroup
from weft.specs import CPU


@dataclass(frozen=True, slots=True)
class Uneven:
    """A call that no group knows yet."""

    outputs: tuple[Tensor, ...]
    tensor: Tensor
    sizes: tuple[int, ...] = (1, 2)


def test_every_tensor_of_a_call_is_seen_alone_or_in_a_tuple() -> None:
    call: Any = Uneven((torch.zeros(1), torch.zeros(2)), torch.ones(3))
    seen: list[tuple[str, int]] = []

    def change(name: str, tensor: Tensor) -> Tensor:
        seen.append((name, tensor.numel()))
        return tensor + 1

    changed: Any = map_tensors(call, change)
    assert seen == [("outputs", 1), ("outputs", 2), ("tensor", 3)]
    assert [tensor.tolist() for tensor in changed.outputs] == [[1.0], [1.0, 1.0]] and changed.sizes == (1, 2)
    assert call.tensor.tolist() == [1.0] * 3
    barrier = Barrier()
    assert map_tensors(barrier, change) is barrier


def test_a_call_is_on_the_cpu_only_if_all_of_it_is() -> None:
    there = torch.zeros(2, device="meta")
    here: Any = Uneven((torch.zeros(1),), torch.zeros(1))
    mixed: Any = Uneven((torch.zeros(1), there), torch.zeros(1))
    assert is_on_cpu(here) and is_on_cpu(Barrier())
    assert not is_on_cpu(mixed) and not is_on_cpu(AllReduce(there))


def test_tensors_of_the_cpu_go_no_way_around() -> None:
    inner = RecordingGroup(SoloGroup())
    group = StagedGroup(inner, CPU)
    tensor = group.empty((4,)).fill_(2.0)
    group.start(AllReduce(tensor)).wait()
    group.all_reduce(tensor)
    assert inner.traffic.num_calls == {"AllReduce": 2} and tensor.tolist() == [2.0] * 4


def test_collectives_of_an_accelerator_go_to_its_own_transport_and_all_else_to_the_host() -> None:
    host, device = RecordingGroup(SoloGroup()), RecordingGroup(SoloGroup())
    group = TwoSidedGroup(StagedGroup(host, torch.device("meta")), device)
    there = torch.zeros(4, device="meta")
    group.run(AllReduce(there))
    group.start(Broadcast(there)).wait()
    group.all_reduce(torch.zeros(1))
    group.barrier()
    assert device.traffic.num_calls == {"AllReduce": 1, "Broadcast": 1}
    assert host.traffic.num_calls == {"AllReduce": 1, "Barrier": 1}
    assert group._side_of(Send(there, 1)) is not device  # NCCL would wait where both send first
