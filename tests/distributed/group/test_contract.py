"""The contract suite over every kind of group, and the broken groups that it must catch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.group import contract, uneven_contract
from weft.distributed.collectives import AlgorithmChoice, AlgorithmName, MessageGroup
from weft.distributed.group import (
    AbstractGroup,
    AbstractWork,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    Delay,
    DoneWork,
    FaultyGroup,
    RecordingGroup,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
    SoloGroup,
)
from weft.distributed.group.staged import StagedGroup
from weft.distributed.virtual import die, run_virtual
from weft.errors import TrainingError
from weft.specs import CPU

SIZES = range(1, 9)
Wrap = Callable[[AbstractGroup], AbstractGroup]


def run_solo(program: Callable[[AbstractGroup], Any], size: int) -> list[Any]:
    assert size == 1
    return [program(SoloGroup())]


def run_threads(
    program: Callable[[AbstractGroup], Any],
    size: int,
    *,
    wrap: Wrap = lambda group: group,
    algorithm: AlgorithmName = "auto",
) -> list[Any]:
    """On the virtual cluster, each rank's group wrapped."""
    result = run_virtual(
        lambda group: program(wrap(group)),
        size,
        choice=AlgorithmChoice(algorithm, ranks_per_host=2),
        timeout=contract.CONTRACT_TIMEOUT,
    )
    return list(result.results)


def over_messages(group: AbstractGroup) -> AbstractGroup:
    return MessageGroup(group, AlgorithmChoice("ring"))


def natively(group: AbstractGroup) -> AbstractGroup:
    return MessageGroup(group, AlgorithmChoice("native"))


def faultily(group: AbstractGroup) -> AbstractGroup:
    return FaultyGroup(group, [Delay(0, seconds=0.001, num_calls=50)], die=die)


KINDS: dict[str, contract.Runner] = {
    "virtual": run_threads,
    "messages": partial(run_threads, wrap=over_messages),
    "native": partial(run_threads, wrap=natively),
    "recording": partial(run_threads, wrap=RecordingGroup),
    "faulty": partial(run_threads, wrap=faultily),
    "staged": partial(run_threads, wrap=lambda group: StagedGroup(group, CPU)),  # tests/stand_in has what it stages
}


@pytest.mark.parametrize("program", contract.PROGRAMS, ids=lambda program: program.__name__)
def test_solo_keeps_the_contract(program: contract.Program) -> None:
    contract.check_kind(program, run_solo, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("program", contract.PROGRAMS, ids=lambda program: program.__name__)
def test_virtual_keeps_the_contract(program: contract.Program, size: int) -> None:
    contract.check_kind(program, run_threads, size)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", ["messages", "native", "recording", "faulty", "staged"])
def test_wrapped_groups_keep_the_contract(kind: str, size: int) -> None:
    contract.check_kind(contract.everything, KINDS[kind], size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree", "halving_doubling", "hierarchical"])
def test_every_all_reduce_keeps_the_contract(algorithm: AlgorithmName, size: int) -> None:
    run = partial(run_threads, algorithm=algorithm)
    for program in (contract.all_reduce, contract.real_sums):
        contract.check_kind(program, run, size)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("how", [die, None], ids=["dead", "silent"])
@pytest.mark.parametrize("collective", contract.COLLECTIVES)
def test_a_lost_peer_is_named_on_every_surviving_rank(
    collective: str, how: Callable[[], Any] | None, size: int
) -> None:
    for run in (KINDS["virtual"], KINDS["messages"]):
        told = run(partial(contract.lose, collective=collective, die=how), size)
        contract.check_loss(told, size)


# Broken groups: each breaks one promise, and the suite must see it.


class AfterWork(AbstractWork):
    """Spoils a result when it is waited for, once."""

    def __init__(self, inner: AbstractWork, spoil: Callable[[], object]) -> None:
        self.inner = inner
        self.spoil: Callable[[], object] | None = spoil

    def wait(self) -> None:
        self.inner.wait()
        if self.spoil is not None:
            self.spoil()
        self.spoil = None

    def is_done(self) -> bool:
        return self.inner.is_done()


class BrokenGroup(AbstractGroup):
    """Hands every call to `sabotage(group, call)`."""

    def __init__(self, inner: AbstractGroup, sabotage: "Sabotage") -> None:
        super().__init__(inner.rank, inner.size, clock=inner.clock, generation=inner.generation)
        self.inner = inner
        self.sabotage = sabotage

    def start(self, call: Call) -> AbstractWork:
        return self.sabotage(self.inner, call)

    def run(self, call: Call) -> None:
        self.start(call).wait()

    def split(self, colour: int, key: int) -> AbstractGroup:
        return self.inner.split(colour, 0 if self.sabotage is forgets_keys else key)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inner.empty(shape, dtype)

    def close(self) -> None:
        self.inner.close()


Sabotage = Callable[[AbstractGroup, Call], AbstractWork]


def misses_the_last_rank(group: AbstractGroup, call: Call) -> AbstractWork:
    if isinstance(call, AllReduce) and call.op == "sum" and group.rank == group.size - 1:
        call.tensor.detach().zero_()
    return group.start(call)


def forgets_to_divide(group: AbstractGroup, call: Call) -> AbstractWork:
    return group.start(replace(call, op="sum") if isinstance(call, AllReduce) and call.op == "mean" else call)


def takes_the_wrong_root(group: AbstractGroup, call: Call) -> AbstractWork:
    if isinstance(call, Broadcast) and call.root < group.size:
        call = replace(call, root=(call.root + 1) % group.size)
    return group.start(call)


def gathers_in_the_wrong_order(group: AbstractGroup, call: Call) -> AbstractWork:
    work = group.start(call)
    if not isinstance(call, AllGather):
        return work
    output = call.output

    def spoil() -> None:
        output.copy_(output.roll(output.numel() // group.size))

    return AfterWork(work, spoil)


def sums_from_its_own_rank_on(group: AbstractGroup, call: Call) -> AbstractWork:
    if not isinstance(call, AllReduce) or call.op != "sum" or call.tensor.dim() != 1:
        return group.start(call)
    rows = torch.empty(group.size, call.tensor.numel(), dtype=call.tensor.dtype)
    group.all_gather(rows, call.tensor.clone())
    call.tensor.zero_()
    for step in range(group.size):
        call.tensor.add_(rows[(group.rank + step) % group.size])
    return DoneWork()


def gathers_a_row_late(group: AbstractGroup, call: Call) -> AbstractWork:
    work = group.start(call)
    if not isinstance(call, AllGather) or call.sizes is None:
        return work
    output = call.output
    return AfterWork(work, lambda: output.copy_(output.roll(1, 0)))


def scatters_a_row_late(group: AbstractGroup, call: Call) -> AbstractWork:
    if isinstance(call, ReduceScatter) and call.sizes is not None:
        call = replace(call, tensor=call.tensor.roll(1, 0))
    return group.start(call)


def exchanges_a_row_late(group: AbstractGroup, call: Call) -> AbstractWork:
    if isinstance(call, AllToAll) and call.send_sizes is not None:
        call = replace(call, tensor=call.tensor.roll(1, 0))
    return group.start(call)


def ignores_tags(group: AbstractGroup, call: Call) -> AbstractWork:
    return group.start(replace(call, tag=0) if isinstance(call, Send | Recv) else call)


def reduces_everywhere(group: AbstractGroup, call: Call) -> AbstractWork:
    return group.start(AllReduce(call.tensor, call.op) if isinstance(call, Reduce) else call)


def says_done_too_early(group: AbstractGroup, call: Call) -> AbstractWork:
    work = group.start(call)
    return DoneWork() if isinstance(call, AllReduce) else work


def has_no_barrier(group: AbstractGroup, call: Call) -> AbstractWork:
    return DoneWork() if isinstance(call, Barrier) else group.start(call)


def forgets_keys(group: AbstractGroup, call: Call) -> AbstractWork:
    return group.start(call)


SABOTAGES: dict[Sabotage, contract.Program] = {
    misses_the_last_rank: contract.all_reduce,
    forgets_to_divide: contract.all_reduce,
    takes_the_wrong_root: contract.broadcast,
    gathers_in_the_wrong_order: contract.all_gather,
    sums_from_its_own_rank_on: contract.real_sums,
    gathers_a_row_late: uneven_contract.uneven_all_gather,
    scatters_a_row_late: uneven_contract.uneven_reduce_scatter,
    exchanges_a_row_late: uneven_contract.uneven_all_to_all,
    ignores_tags: contract.messages,
    reduces_everywhere: contract.reduce,
    says_done_too_early: contract.all_reduce,
    has_no_barrier: contract.barrier,
    forgets_keys: contract.splitting,
}


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.__name__)
def test_the_suite_catches_a_broken_group(sabotage: Sabotage, size: int) -> None:
    run = partial(run_threads, wrap=lambda group: BrokenGroup(group, sabotage))
    with pytest.raises((AssertionError, TrainingError)):
        contract.check_kind(SABOTAGES[sabotage], run, size)


def test_check_loss_refuses_a_wrong_name() -> None:
    with pytest.raises(AssertionError):
        contract.check_loss([[2, 2], [1, 1], None], 3)
    with pytest.raises(AssertionError):
        contract.check_loss([[2, 2], [2], None], 3)
