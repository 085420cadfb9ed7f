"""Peers for the contract: as threads of this process over any kind of real mailbox, or as ranks in virtual time."""

import threading
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

from tests.distributed.mailbox.contract import Program, Setup
from weft.distributed.group import AbstractGroup
from weft.distributed.mailbox import AbstractMailbox, LocalTransport, MailboxKind, VirtualMailbox, open_mailbox
from weft.distributed.virtual import run_virtual
from weft.secret import make_secret

Wrap = Callable[[AbstractMailbox], AbstractMailbox]


def same(mailbox: AbstractMailbox) -> AbstractMailbox:
    return mailbox


def run_threads(program: Callable[[Setup], Any], size: int, open: Callable[[int], AbstractMailbox]) -> list[Any]:
    """Run the program in one thread for each peer; the first failure is raised when all have ended."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def live(address: int) -> None:
        opened: list[AbstractMailbox] = []

        def open_own() -> AbstractMailbox:
            opened.append(open(address))
            return opened[-1]

        try:
            results[address] = program(Setup(address, size, open_own))
        except BaseException as error:
            failures.append(error)
        finally:
            for mailbox in opened:
                mailbox.close()

    threads = [threading.Thread(target=live, args=(address,)) for address in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def run_local(program: Program, size: int, wrap: Wrap = same) -> list[Any]:
    transport = LocalTransport()
    return run_threads(program, size, lambda address: wrap(transport.open(address)))


def run_sockets(program: Program, size: int, wrap: Wrap = same, kind: MailboxKind = "tcp") -> list[Any]:
    """Each peer has sockets and a thread of its own, as if it were a process."""
    with TemporaryDirectory() as folder:
        secret = make_secret()
        return run_threads(program, size, lambda address: wrap(open_mailbox(kind, folder, address, secret=secret)))


def run_in_virtual_time(program: Program, size: int, wrap: Wrap = same) -> list[Any]:
    def rank_program(group: AbstractGroup) -> Any:
        return program(Setup(group.rank, group.size, lambda: wrap(VirtualMailbox(group))))

    return list(run_virtual(rank_program, size).results)
