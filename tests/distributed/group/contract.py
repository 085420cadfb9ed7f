"""The contract of groups: what every kind must do, as programs that run on all ranks and return what went wrong.

A program is a module-level function of a group, so that any kind can start it, in threads or in processes. It returns
`{"problems": [...], "digest": "..."}`: no problems, and the same digest on all ranks, is a pass. `check_kind` is the
judge. Values are small whole numbers where results must be exact in every type, so no summation order is assumed.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.distributed.group import uneven_contract
from tests.distributed.group.findings import (
    DTYPES,
    Findings,
    Program,
    Report,
    Runner,
    cases,
    check_kind,
    everyone,
    perform,
    values,
)
from weft.distributed.group import AbstractGroup, AllReduce, Barrier, Broadcast, Call, NeighbourGraph, Recv, Send, calls
from weft.errors import PeerLostError, UsageError

__all__ = [
    "COLLECTIVES",
    "CONTRACT_TIMEOUT",
    "PROGRAMS",
    "Program",
    "Report",
    "Runner",
    "check_kind",
    "check_loss",
    "lose",
]

CONTRACT_TIMEOUT = 1.0
"""Seconds after which a silent peer is lost: runners must build their groups with it for the loss checks."""


def identity(group: AbstractGroup) -> Report:
    found = Findings(group)
    found.expect_true("rank lies outside the group", 0 <= group.rank < group.size)
    found.expect_true("generation is not a count", group.generation >= 0)
    ranks = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(ranks, torch.tensor([group.rank]))
    found.expect("every rank once", ranks, torch.arange(group.size))
    for dtype in DTYPES:
        tensor = group.empty((2, 3), dtype)
        found.expect_true("empty() has another form", tensor.shape == (2, 3) and tensor.dtype == dtype)
        tensor.fill_(group.rank)
        group.all_reduce(tensor)
        found.expect("tensor of empty()", tensor, torch.full((2, 3), sum(range(group.size)), dtype=dtype))
    before = group.clock.now()
    group.clock.charge(0.0)
    group.clock.wait_until(before)
    found.expect_true("time runs backwards", group.clock.now() >= before)
    return found.report()


def all_reduce(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, length, later in cases():
        inputs = everyone(group.size, length, dtype)
        wanted = {"sum": inputs.sum(0).to(dtype), "min": inputs.amin(0), "max": inputs.amax(0)}
        for op, result in wanted.items():
            tensor = values(group.rank, length, dtype)
            perform(group, AllReduce(tensor, op), later=later)  # type: ignore[arg-type]
            found.expect(f"all_reduce {op} {dtype} {length}", tensor, result)
            found.share(tensor)
        doubles = torch.full((length,), 2, dtype=dtype)
        perform(group, AllReduce(doubles, "product"), later=later)
        found.expect(f"product {dtype}", doubles, torch.full((length,), 2**group.size, dtype=dtype))
        if dtype.is_floating_point:
            mean = values(group.rank, length, dtype)
            perform(group, AllReduce(mean, "mean"), later=later)
            tolerance = 0.01 if dtype == torch.bfloat16 else 1e-6
            found.expect_close(f"mean {dtype}", mean, inputs.double().mean(0), tolerance)
            found.share(mean)
    return found.report()


def real_sums(group: AbstractGroup) -> Report:
    """Numbers whose sum depends on the order: near the sum in float64, and the same bits everywhere."""
    found = Findings(group)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 0.2)):
        inputs = torch.stack([_noise(rank, 1031) for rank in range(group.size)]).to(dtype)
        for _ in range(2):
            tensor = inputs[group.rank].clone()
            group.all_reduce(tensor)
            found.expect_close(f"sum {dtype}", tensor, inputs.double().sum(0), tolerance)
            found.share(tensor)
    return found.report()


def _noise(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def reduce_scatter(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, length, later in cases():
        inputs = everyone(group.size, length * group.size, dtype)
        for op in ("sum", "max"):
            output = torch.full((length,), 9, dtype=dtype)
            call = calls.ReduceScatter(output, inputs[group.rank].clone(), op)
            perform(group, call, later=later)
            whole = inputs.sum(0).to(dtype) if op == "sum" else inputs.amax(0)
            found.expect(f"reduce_scatter {op} {dtype}", output, whole.view(group.size, length)[group.rank])
        own = inputs[group.rank].clone()
        part = own.view(group.size, length)[group.rank]
        perform(group, calls.ReduceScatter(part, own), later=later)
        whole = inputs.sum(0).to(dtype).view(group.size, length)
        found.expect(f"reduce_scatter in place {dtype} {length}", part, whole[group.rank])
    output = torch.zeros(2, 3)
    group.reduce_scatter(output, torch.full((2 * group.size, 3), float(group.rank)), "mean")
    found.expect_close("reduce_scatter mean", output, torch.full((2, 3), (group.size - 1) / 2), 1e-6)
    return found.report()


def all_gather(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, length, later in cases():
        output = torch.full((group.size * length,), 9, dtype=dtype)
        perform(group, calls.AllGather(output, values(group.rank, length, dtype)), later=later)
        found.expect(f"all_gather {dtype} {length}", output, everyone(group.size, length, dtype).view(-1))
        found.share(output)
        output = torch.full((group.size, length), 9, dtype=dtype)
        part = output[group.rank].copy_(values(group.rank, length, dtype))
        perform(group, calls.AllGather(output.view(-1), part), later=later)
        found.expect(f"all_gather in place {dtype} {length}", output, everyone(group.size, length, dtype))
    return found.report()


def all_to_all(group: AbstractGroup) -> Report:
    found = Findings(group)
    for dtype, length, later in cases():
        inputs = everyone(group.size, length * group.size, dtype)
        output = torch.full((group.size * length,), 9, dtype=dtype)
        perform(group, calls.AllToAll(output, inputs[group.rank].clone()), later=later)
        parts = inputs.view(group.size, group.size, length)[:, group.rank]
        found.expect(f"all_to_all {dtype} {length}", output, parts.reshape(-1))
    return found.report()


def broadcast(group: AbstractGroup) -> Report:
    found = Findings(group)
    for root in range(group.size):
        for dtype, length, later in cases(root):
            tensor = values(group.rank, length, dtype)
            perform(group, Broadcast(tensor, root), later=later)
            found.expect(f"broadcast from {root} {dtype}", tensor, values(root, length, dtype))
            found.share(tensor)
    return found.report()


def reduce(group: AbstractGroup) -> Report:
    found = Findings(group)
    for root in range(group.size):
        for dtype, length, later in cases(root):
            own = values(group.rank, length, dtype)
            tensor = own.clone()
            perform(group, calls.Reduce(tensor, root), later=later)
            total = everyone(group.size, length, dtype).sum(0).to(dtype)
            found.expect(f"reduce to {root} {dtype}", tensor, total if group.rank == root else own)
    return found.report()


def graphs(size: int) -> list[NeighbourGraph]:
    """A ring one way, a star, and no edges at all; the last with one rank too."""
    ring = tuple(((rank - 1) % size,) if size > 1 else () for rank in range(size))
    star = (tuple(range(size - 1, 0, -1)), *((0,) for _ in range(1, size)))
    return [ring, star, ((),) * size]


def neighbours(group: AbstractGroup) -> Report:
    found = Findings(group)
    for graph in graphs(group.size):
        sources = graph[group.rank]
        for dtype, length, later in cases():
            if not dtype.is_floating_point:
                continue
            own, inputs = values(group.rank, length, dtype), everyone(group.size, length, dtype)
            weights = tuple((0.5, *(0.25 * (i + 1) for i in range(len(row)))) for row in graph)
            perform(group, calls.NeighbourAllReduce(own, graph, weights), later=later)
            wanted = inputs[[group.rank, *sources]].double().T @ torch.tensor(weights[group.rank]).double()
            found.expect_close(f"neighbour_all_reduce {graph}", own, wanted, 0.05 if dtype == torch.bfloat16 else 0.0)
    return found.report()


def barrier(group: AbstractGroup) -> Report:
    """No rank leaves before the last has come."""
    found = Findings(group)
    for late in range(group.size):
        if group.rank == late:
            group.clock.wait_until(group.clock.now() + 1e-3)
        came = torch.tensor([group.clock.now()], dtype=torch.float64)
        perform(group, Barrier(), later=late % 2 == 0)
        left = group.clock.now()
        all_came = torch.empty(group.size, dtype=torch.float64)
        group.all_gather(all_came, came)
        found.expect_true(f"left a barrier before rank {late} came", left >= float(all_came.max()))
    return found.report()


def messages(group: AbstractGroup) -> Report:
    """Tags choose among messages, messages with one tag keep their order, and all pairs at once work."""
    found = Findings(group)
    peers = [peer for peer in range(group.size) if peer != group.rank]
    sends, arrivals = [], {}
    for peer in peers:
        for tag, number in ((0, 0), (1, 1), (0, 2), (1, 3)):
            sends.append(group.start(Send(torch.full((3,), 10.0 * group.rank + number), peer, tag)))
    for tag, number in ((1, 1), (1, 3), (0, 0), (0, 2)):
        for peer in reversed(peers):
            arrivals[peer, number] = torch.empty(3)
            group.recv(arrivals[peer, number], peer, tag)
    for work in sends:
        work.wait()
    for (peer, number), tensor in arrivals.items():
        found.expect(f"message {number} of rank {peer}", tensor, torch.full((3,), 10.0 * peer + number))
    for dtype, length, later in cases():
        for peer in peers:
            arrival = torch.full((length,), 9, dtype=dtype)
            recv = group.start(Recv(arrival, peer, 5))
            perform(group, Send(values(group.rank, length, dtype), peer, 5), later=later)
            recv.wait()
            found.expect(f"message from {peer} {dtype}", arrival, values(peer, length, dtype))
    return found.report()


def in_flight(group: AbstractGroup) -> Report:
    """Many calls under way, waited for in another order on each rank, with messages in between."""
    found = Findings(group)
    tensors = [values(group.rank, 17 + number, torch.float32) for number in range(24)]
    works = [group.start(AllReduce(tensor)) for tensor in tensors]
    root = group.size - 1
    late = torch.full((4,), float(group.rank))
    works.append(group.start(Broadcast(late, root)))
    if group.size > 1:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        token = torch.zeros(1)
        works.append(group.start(Send(torch.tensor([float(group.rank)]), right, 3)))
        group.recv(token, left, 3)
        found.expect("message among collectives", token, torch.tensor([float(left)]))
    for number in range(len(works)):
        works[(number * 7 + group.rank) % len(works)].wait()
    for work in works:
        work.wait()
    for number, tensor in enumerate(tensors):
        found.expect(f"call {number}", tensor, everyone(group.size, 17 + number, torch.float32).sum(0))
        found.share(tensor)
    found.expect("broadcast after them", late, torch.full((4,), float(root)))
    return found.report()


def layouts(group: AbstractGroup) -> Report:
    """Inputs and outputs that are not contiguous, parameters among them."""
    found = Findings(group)
    size, rank = group.size, group.rank
    turned = values(rank, 12, torch.float32).view(3, 4).T
    group.all_reduce(turned)
    found.expect("transposed", turned, everyone(size, 12, torch.float32).sum(0).view(3, 4).T)
    backing = torch.zeros(10)
    strided = backing[::2]
    strided.copy_(values(rank, 5, torch.float32))
    group.broadcast(strided, root=size - 1)
    found.expect("strided", backing[::2], values(size - 1, 5, torch.float32))
    found.expect("gaps are left alone", backing[1::2], torch.zeros(5))
    output = torch.zeros(4, size * 2).T
    group.all_gather(output, torch.full((4, 2), float(rank)).T)
    found.expect("strided output", output, torch.arange(size).repeat_interleave(2).float()[:, None].expand(-1, 4))
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    with torch.no_grad():
        work = group.start(Broadcast(parameter, 0))
        work.wait()
    found.expect("parameter", parameter.detach(), torch.zeros(3))
    if size > 1 and rank < 2:
        recv = group.start(Recv(backing[1::2], 1 - rank))
        group.send(values(rank, 10, torch.float32)[::2], 1 - rank)
        recv.wait()
        found.expect("strided message", backing[1::2], values(1 - rank, 10, torch.float32)[::2])
    return found.report()


def large(group: AbstractGroup) -> Report:
    found = Findings(group)
    length = (1 << 20) + 3
    tensor = torch.full((length,), float(group.rank + 1))
    group.all_reduce(tensor)
    total = group.size * (group.size + 1) / 2
    found.expect_true("large all_reduce", bool((tensor == total).all()))
    tensor.fill_(group.rank)
    group.broadcast(tensor, group.size - 1)
    found.expect_true("large broadcast", bool((tensor == group.size - 1).all()))
    return found.report()


def splitting(group: AbstractGroup) -> Report:
    """Colours part, keys order, both groups work side by side, and the whole still works."""
    found = Findings(group)
    rank, size = group.rank, group.size
    part = group.split(colour=rank % 2, key=-rank)
    ranks = sorted((other for other in range(size) if other % 2 == rank % 2), reverse=True)
    found.expect_true("size of the part", part.size == len(ranks))
    found.expect_true("keys order the part", part.rank == ranks.index(rank))
    for _ in range(2):
        inside, whole = torch.tensor([float(rank)]), torch.tensor([1.0])
        works = [part.start(AllReduce(inside)), group.start(AllReduce(whole))]
        for work in works:
            work.wait()
        found.expect("sum in the part", inside, torch.tensor([float(sum(ranks))]))
        found.expect("sum in the whole", whole, torch.tensor([float(size)]))
    again = group.split(colour=0, key=0)
    found.expect_true("equal keys keep the order of ranks", (again.rank, again.size) == (rank, size))
    part.close()
    again.close()
    group.barrier()
    return found.report()


def refusals(group: AbstractGroup) -> Report:
    """A wrong call is refused where it is made, and the group goes on."""
    found = Findings(group)
    size, tensor = group.size, torch.zeros(2)
    wrong: list[Call] = [
        Send(tensor, size),
        Recv(tensor, -1),
        Send(tensor, group.rank),
        Broadcast(tensor, size),
        calls.AllGather(torch.zeros(2 * size + 1), tensor),
        calls.AllGather(torch.zeros(2 * size), tensor, (2,) * (size + 1)),
        calls.AllReduce(torch.zeros(2, dtype=torch.int64), "mean"),
        calls.NeighbourAllReduce(tensor, ((),) * (size + 1), ((1.0,),) * (size + 1)),
    ]
    for call in wrong:
        try:
            group.start(call).wait()
            found.problems.append(f"rank {group.rank}: took {call}")
        except UsageError:
            pass
    group.barrier()
    return found.report()


def closing(group: AbstractGroup) -> Report:
    group.barrier()
    group.close()
    group.close()
    return Findings(group).report()


PROGRAMS: tuple[Program, ...] = (
    identity,
    all_reduce,
    real_sums,
    reduce_scatter,
    all_gather,
    all_to_all,
    *uneven_contract.PROGRAMS,
    broadcast,
    reduce,
    neighbours,
    barrier,
    messages,
    in_flight,
    layouts,
    large,
    splitting,
    refusals,
    closing,
)


def everything(group: AbstractGroup) -> Report:
    """All programs one after another, for kinds whose ranks are dear to start."""
    reports = [program(group) for program in PROGRAMS]
    digest = hashlib.sha256("".join(report["digest"] for report in reports).encode()).hexdigest()
    return {"problems": [problem for report in reports for problem in report["problems"]], "digest": digest}


# Loss of a peer. `collective` is a name of COLLECTIVES; the last rank is the one that is lost.

COLLECTIVES: dict[str, Callable[[int, int], Call]] = {
    "all_reduce": lambda rank, size: AllReduce(torch.ones(64)),
    "reduce_scatter": lambda rank, size: calls.ReduceScatter(torch.ones(4), torch.ones(4 * size)),
    "all_gather": lambda rank, size: calls.AllGather(torch.ones(4 * size), torch.ones(4)),
    "all_to_all": lambda rank, size: calls.AllToAll(torch.ones(4 * size), torch.ones(4 * size)),
    **uneven_contract.COLLECTIVES,
    "broadcast": lambda rank, size: Broadcast(torch.ones(4), 0),
    "broadcast_from_lost": lambda rank, size: Broadcast(torch.ones(4), size - 1),
    "reduce": lambda rank, size: calls.Reduce(torch.ones(4), 0),
    "neighbours": lambda rank, size: calls.NeighbourAllReduce(torch.ones(4), graphs(size)[0], ((0.5, 0.5),) * size),
    "barrier": lambda rank, size: Barrier(),
    "recv": lambda rank, size: Recv(torch.ones(4), size - 1),
}


def lose(group: AbstractGroup, collective: str, die: Callable[[], Any] | None) -> list[int]:
    """The last rank dies, or falls silent where `die` is None. Whom the others were told to have lost: by the call or,
    where it could end without the lost rank, by a barrier after it; and by a later call."""
    group.barrier()
    if group.rank == group.size - 1:
        if die is not None:
            die()
        group.clock.wait_until(group.clock.now() + 4 * CONTRACT_TIMEOUT)
        return []
    told = []
    try:
        group.start(COLLECTIVES[collective](group.rank, group.size)).wait()
        group.barrier()
    except PeerLostError as error:
        told.append(error.peer)
    try:
        group.barrier()
    except PeerLostError as error:
        told.append(error.peer)
    group.close()
    return told


def close_while_waiting(group: AbstractGroup) -> str:
    """The first of two ranks waits, and another thread of it closes the group: how that ended, and for the other rank,
    which waits as well."""
    group.barrier()
    closing = threading.Timer(0.3, group.close)
    if group.rank == 0:
        closing.start()
    try:
        group.recv(torch.empty(1), 1 - group.rank)
    except (UsageError, PeerLostError, RuntimeError) as error:
        return type(error).__name__
    finally:
        if group.rank == 0:
            closing.join()
        group.close()
    return "it went on"


def check_loss(told: list[Any], size: int) -> None:
    """Every survivor was told twice, and told the right rank."""
    assert told[:-1] == [[size - 1, size - 1]] * (size - 1), told
