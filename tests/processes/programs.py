"""What ranks run in tests: import paths, so that any engine can start them."""

from dataclasses import replace

from tests.distributed.group import contract
from weft.distributed.group import AbstractGroup, kill_this_process
from weft.engines.meeting import Kind, meet
from weft.engines.place import find_place


def keep_contract(kind: Kind, program: str = "everything", ranks_per_host: int = 0) -> contract.Report:
    """A program of the contract suite."""
    group = open_group(kind, 30, ranks_per_host)
    try:
        report: contract.Report = getattr(contract, program)(group)
        return report
    finally:
        group.close()


def lose_peer(kind: Kind, collective: str, how: str, ranks_per_host: int = 0) -> list[int]:
    """The last rank dies or falls silent; whom the others were told to have lost."""
    group = open_group(kind, contract.CONTRACT_TIMEOUT, ranks_per_host)
    return contract.lose(group, collective, kill_this_process if how == "dead" else None)


def open_group(kind: Kind, timeout: float, ranks_per_host: int) -> AbstractGroup:
    """As if a host held so few ranks, where that is asked for."""
    place = find_place()
    return meet(replace(place, local_size=ranks_per_host or place.local_size), kind, timeout=timeout)
