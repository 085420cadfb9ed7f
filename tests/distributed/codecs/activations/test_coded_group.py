"""Collectives in a wire format: equal bits on all ranks, sums in their order, bytes as the planner counts them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.distributed.codecs.activations import CodedGroup, coded_group, make_format, pack, unpack
from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllGather, AllReduce
from weft.distributed.place.topology import algorithm_of
from weft.distributed.virtual import run_virtual
from weft.planning.activation_cost import activation_bytes
from weft.planning.placement_cost import tensor_cost
from weft.specs import parse_plan
from weft.specs.plan import Choice

NAMES = ("bf16", "fp16", "linear8", "tree8")
EIGHT = ("linear8", "tree8")
SIZE = 6000


def values(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape or (SIZE,), generator=torch.Generator().manual_seed(rank))


def rounded(name: str, x: Tensor) -> Tensor:
    """As it arrives elsewhere."""
    wire_format = make_format(Choice(name))
    return unpack(wire_format, pack(wire_format, x), tuple(x.shape), x.dtype)


def on_ranks(name: str, program: Callable[[CodedGroup], Any], size: int) -> list[Any]:
    return list(run_virtual(lambda group: program(CodedGroup(group, make_format(Choice(name)))), size).results)


def summed(group: AbstractGroup) -> Tensor:
    x = values(group.rank)
    group.all_reduce(x)
    return x


def check_equal(found: list[Tensor]) -> None:
    for other in found[1:]:
        assert torch.equal(other, found[0]), "ranks differ"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks(name: str, size: int) -> None:
    found = on_ranks(name, summed, size)
    check_equal(found)
    exact = torch.stack([values(rank) for rank in range(size)]).double().sum(0)
    assert 0 < float((found[0] - exact).norm() / exact.norm()) < 0.03


@pytest.mark.parametrize("name", EIGHT)
def test_two_ranks_add_what_both_have_decoded_in_their_order(name: str) -> None:
    for found in on_ranks(name, summed, 2):
        assert torch.equal(found, rounded(name, values(0)) + rounded(name, values(1)))


@pytest.mark.parametrize("name", EIGHT)
def test_of_three_ranks_each_part_is_added_by_one_and_rounded_again(name: str) -> None:
    expected = []
    for part in range(3):
        own = [rounded(name, values(rank).split(SIZE // 3)[part]) for rank in range(3)]
        expected.append(rounded(name, own[0] + own[1] + own[2]))
    for found in on_ranks(name, summed, 3):
        assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_on_the_wire_are_those_of_the_formula(name: str, size: int) -> None:
    format_of = make_format(Choice(name))
    ring = algorithm_of(parse_plan(f"data={size} topology=ring"))
    result = run_virtual(lambda group: summed(CodedGroup(group, format_of)), size, choice=ring)
    planned = tensor_cost(size, 4.0 * SIZE, activations=name).bytes_sent / 2  # of one sum
    slack = 0 if size == 2 or name not in EIGHT else 2 * 4 * size  # scales of parts
    assert planned - 1 <= max(result.bytes_sent) <= planned + slack


@pytest.mark.parametrize("name", NAMES)
def test_messages_are_counted(name: str) -> None:
    def program(group: CodedGroup) -> int:
        summed(group)
        return group.num_bytes

    assert on_ranks(name, program, 2) == [activation_bytes(name, 4.0 * SIZE)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_unequal_size(name: str) -> None:
    """Gathered, and scattered from a sum, one of them empty."""
    sizes = (300, 0, 500)

    def program(group: CodedGroup) -> tuple[Tensor, Tensor]:
        whole, part = torch.empty(800, 2), torch.empty(sizes[group.rank], 2)
        group.all_gather(whole, values(group.rank, sizes[group.rank], 2), sizes)
        group.reduce_scatter(part, values(group.rank, 800, 2), "sum", sizes)
        return whole, part

    found = on_ranks(name, program, 3)
    expected = torch.cat([rounded(name, values(rank, size, 2)) for rank, size in enumerate(sizes)])
    for whole, _ in found:
        assert torch.equal(whole, expected)
    total = torch.stack([values(rank, 800, 2) for rank in range(3)]).sum(0)
    assert 0 < float((torch.cat([part for _, part in found]) - total).norm() / total.norm()) < 0.03


@pytest.mark.parametrize("name", NAMES)
def test_pieces_for_others_are_encoded_one_by_one(name: str) -> None:
    def program(group: CodedGroup) -> Tensor:
        sent = tuple(100 * (1 + group.rank + peer) for peer in range(2))
        received = tuple(100 * (1 + peer + group.rank) for peer in range(2))
        output = torch.empty(sum(received))
        group.all_to_all(output, values(group.rank, sum(sent)), sent, received)
        return output

    first, second = on_ranks(name, program, 2)
    pieces = [values(0, 300).split((100, 200)), values(1, 500).split((200, 300))]
    wire_format = make_format(Choice(name))
    as_sent = [[wire_format.decode(wire_format.encode(p), len(p), p.dtype) for p in own] for own in pieces]
    assert torch.equal(first, torch.cat([as_sent[0][0], as_sent[1][0]]))
    assert torch.equal(second, torch.cat([as_sent[0][1], as_sent[1][1]]))


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_counts_and_few_numbers_are_exact(name: str) -> None:
    def program(group: CodedGroup) -> None:
        largest, counts, few = values(group.rank), torch.arange(1000) + group.rank, values(group.rank, 10)
        group.all_reduce(largest, "max")
        group.all_reduce(counts)
        group.all_reduce(few)
        assert torch.equal(largest, torch.maximum(values(0), values(1)))
        assert torch.equal(counts, 2 * torch.arange(1000) + 1) and torch.equal(few, values(0, 10) + values(1, 10))

    on_ranks(name, program, 2)


@pytest.mark.parametrize("name", EIGHT)
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_that_is_started_is_there_when_it_was_waited_for(name: str, size: int) -> None:
    def program(group: CodedGroup) -> Tensor:
        x = values(group.rank)
        work = group.start(AllReduce(x))
        assert not work.is_done()
        work.wait()
        work.wait()
        assert work.is_done()
        return x

    assert torch.equal(on_ranks(name, program, size)[0], on_ranks(name, summed, size)[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_reaches_all_ranks(name: str) -> None:
    def program(group: CodedGroup) -> Tensor:
        x = values(group.rank)
        x[7] = torch.nan if group.rank else 1.0
        group.all_reduce(x)
        return x

    for found in on_ranks(name, program, 3):
        assert found.isnan().nonzero().flatten().tolist() == [7]


# ---- planted faults


def test_a_rank_that_keeps_its_own_exact_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_own(wire_format: Any, tensor: Tensor, rank: int, size: int) -> Any:
        message = wire_format.encode(tensor)
        everyone = message.new_empty((size, message.numel()))
        yield AllGather(everyone, message.unsqueeze(0))
        for other in range(size):
            if other != rank:
                tensor.add_(wire_format.decode(everyone[other], tensor.numel(), tensor.dtype))
        return tensor

    monkeypatch.setattr(coded_group, "_gather_sum", keep_own)
    with pytest.raises(AssertionError, match="ranks differ"):
        check_equal(on_ranks("tree8", summed, 2))


def test_an_owner_that_keeps_its_exact_sum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = coded_group._gather

    def keep_own(wire_format: Any, output: Tensor, tensor: Tensor, sizes: Any) -> Any:
        exact = tensor.clone()
        yield from real(wire_format, output, tensor, sizes)
        part = next(p for p in output.view(-1).split(sizes) if torch.allclose(p, exact, atol=0.2))
        part.copy_(exact)
        return output

    monkeypatch.setattr(coded_group, "_gather", keep_own)
    with pytest.raises(AssertionError, match="ranks differ"):
        check_equal(on_ranks("tree8", summed, 3))
