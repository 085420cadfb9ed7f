"""What ranks run in tests: import paths, so that any engine can start them."""

from dataclasses import replace

import torch
import torch.distributed

from tests.distributed.group import contract
from weft.distributed.collectives import probe_network
from weft.distributed.group import AbstractGroup, AllReduce, kill_this_process
from weft.distributed.place import Kind, find_launch, open_group, with_topology
from weft.specs import parse_plan


def keep_contract(kind: Kind, program: str = "everything", ranks_per_host: int = 0) -> contract.Report:
    """A program of the contract suite."""
    group = open_over(kind, 30, ranks_per_host)
    try:
        report: contract.Report = getattr(contract, program)(group)
        return report
    finally:
        group.close()


def keep_contract_and_lose_peer() -> tuple[list[contract.Report], list[contract.Report], list[int]]:
    """Under mpirun, whose ranks are dear to start: the contract by all, by the first two alone, and a last rank that
    falls silent, and has then no result."""
    from mpi4py import MPI

    own = contract.everything(open_group(find_launch(), "mpi", timeout=30))
    whole = MPI.COMM_WORLD.allgather(own)
    group = open_group(find_launch(), "mpi", timeout=30, generation=1)
    pair = contract.everything(group.split(colour=int(group.rank < 2), key=group.rank))
    pairs = MPI.COMM_WORLD.allgather(pair)[:2]
    group.close()
    short = open_group(find_launch(), "mpi", timeout=contract.CONTRACT_TIMEOUT, generation=2)
    return whole, pairs, contract.lose(short, "all_reduce", None)


def choose_by_probe(ranks_per_host: int) -> list[float]:
    """Measure, and add up messages of three sizes by what is then the fastest; the hosts that were found, and the sums,
    which are those of some of the ranks last."""
    plan = parse_plan("data=4 topology=auto")
    group = with_topology(open_over("hierarchical", 30, ranks_per_host), plan, ranks_per_host)
    network = probe_network(group, ranks_per_host)
    totals = [torch.full((size,), 1.0 + group.rank) for size in (2, 3000, 500_000)]
    for work in [group.start(AllReduce(total)) for total in totals]:
        work.wait()
    own = torch.tensor([1.0 + group.rank])
    part = group.split(group.rank % 2, group.rank)
    part.all_reduce(own)
    part.close()
    group.close()
    return [network.ranks_per_host or 0, *(float(total.mean()) for total in totals), own.item()]


def meet_over(kinds: list[Kind]) -> list[str]:
    """Meet over each kind in turn, each time anew; the names of the groups, and their sums."""
    met = []
    for generation, kind in enumerate(kinds):
        group = open_group(find_launch(), kind, timeout=30, generation=generation)
        total = torch.tensor([1 + group.rank])
        group.all_reduce(total)
        met.append(f"{type(group).__name__} {group.generation} {total.item()}")
        group.close()
    return met


def meet_beside_default_group(kinds: list[Kind]) -> list[str]:
    """The user opens a process group of his own, and a group of ours leaves it as it is."""
    met = meet_over(kinds)
    torch.distributed.init_process_group("gloo")
    group = open_group(find_launch(), "torch", timeout=30, generation=len(kinds))
    ours, theirs = torch.tensor([1.0]), torch.tensor([2.0])
    works = group.start(AllReduce(ours)), torch.distributed.all_reduce(theirs, async_op=True)
    for work in works:
        work.wait()
    group.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return [*met, f"ours {ours.item():g}, theirs {theirs.item():g}"]


def lose_peer(kind: Kind, collective: str, how: str, ranks_per_host: int = 0) -> list[int]:
    """The last rank dies or falls silent; whom the others were told to have lost."""
    group = open_over(kind, contract.CONTRACT_TIMEOUT, ranks_per_host)
    return contract.lose(group, collective, kill_this_process if how == "dead" else None)


def close_while_waiting(kind: Kind) -> str:
    return contract.close_while_waiting(open_over(kind, 15, 0))


def open_over(kind: Kind, timeout: float, ranks_per_host: int) -> AbstractGroup:
    """As if a host held so few ranks, where that is asked for."""
    launch = find_launch()
    return open_group(replace(launch, local_size=ranks_per_host or launch.local_size), kind, timeout=timeout)
