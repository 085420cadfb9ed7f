"""The cheapest way through a chain, against all of them; and its cost, against what a group was asked to send."""

import itertools
import math
from typing import final

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.distributed.group import AbstractGroup
from weft.distributed.group.calls import AllGather, AllToAll, Barrier, Call, ReduceScatter
from weft.distributed.group.group import AbstractWork
from weft.distributed.placement.linear import make_linear
from weft.distributed.placement.linear.ways import WAYS, Way, choose_ways, cost_of
from weft.distributed.placement.mesh import MeshGroups
from weft.distributed.virtual import run_virtual
from weft.specs import as_plan
from weft.training.placement import WholeModel

SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=5)


def costs_of(chain: tuple[Way, ...], sizes: list[tuple[int, int]], num_ranks: int) -> float:
    return sum(cost_of(way, *size, num_ranks) for way, size in zip(chain, sizes, strict=True))


def is_sound(chain: tuple[Way, ...], joints: list[bool]) -> bool:
    befores, afters = [way.before for way in chain], [way.after for way in chain]
    met = all(after == before for after, before in zip(afters, befores[1:], strict=False))
    allowed = all(after == "own" or joint for after, joint in zip(afters, [*joints, False], strict=True))
    return befores[0] == "own" and met and allowed


@given(SIZES, st.integers(2, 6), st.data())
def test_no_way_is_cheaper(widths: list[int], num_ranks: int, data: st.DataObject) -> None:
    sizes = list(itertools.pairwise(widths))
    joints = data.draw(st.lists(st.booleans(), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    chosen = choose_ways(sizes, joints, num_ranks)
    assert is_sound(chosen, joints)
    sound = (chain for chain in itertools.product(WAYS, repeat=len(sizes)) if is_sound(chain, joints))
    cheapest = min(costs_of(chain, sizes, num_ranks) for chain in sound)
    assert math.isclose(costs_of(chosen, sizes, num_ranks), cheapest)


@final
class NotingGroup(AbstractGroup):
    """Wraps a group, and those that are split from it: notes their calls."""

    def __init__(self, inner: AbstractGroup, calls: list[Call]) -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock)
        self._inner, self._calls = inner, calls

    def start(self, call: Call) -> AbstractWork:
        self._calls.append(call)
        return self._inner.start(call)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        return NotingGroup(self._inner.split(colour, key), self._calls)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self._inner.empty(shape, dtype)

    def close(self) -> None:
        self._inner.close()


def _is_of_floats(call: Call) -> bool:
    return not isinstance(call, Barrier) and call.tensor.dtype is torch.float32


def sent_by(call: Call, rank: int) -> int:
    """Elements that one rank has for others."""
    if isinstance(call, AllGather):
        return call.tensor.numel() * (call.output.numel() // max(1, call.tensor.numel()) - 1)
    if isinstance(call, ReduceScatter):
        return call.tensor.numel() - call.output.numel()
    assert isinstance(call, AllToAll) and call.send_sizes is not None
    return sum(size for peer, size in enumerate(call.send_sizes) if peer != rank)


def test_the_cost_is_what_ranks_send() -> None:
    num_ranks, samples, sizes = 4, 8, [(32, 48), (48, 40), (40, 8)]

    def program(inner: AbstractGroup) -> int:
        calls: list[Call] = []
        group = NotingGroup(inner, calls)
        groups = MeshGroups(group, as_plan("linear=4").mesh(group.rank))
        layers = [nn.Linear(*size) for size in sizes]
        net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        make_linear(groups, as_plan("linear=4"), WholeModel()).place(net)
        calls.clear()
        net(torch.randn(samples // num_ranks, 32, requires_grad=True)).sum().backward()
        return sum(sent_by(call, group.rank) for call in calls if _is_of_floats(call))

    found = run_virtual(program, num_ranks).results
    expected = costs_of(choose_ways(sizes, [True, True], num_ranks), sizes, num_ranks) * samples * 3 / 4
    assert list(found) == [2 * expected] * num_ranks  # forward and backward
