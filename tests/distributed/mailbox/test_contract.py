"""The contract suite over every kind of mailbox, and the broken mailboxes that it must catch."""

import threading
from functools import partial

import pytest

from tests.distributed.mailbox import contract
from tests.distributed.mailbox.broken import FAULTS, BrokenMailbox
from tests.distributed.mailbox.peers import Wrap, run_in_virtual_time, run_local, run_sockets
from weft.distributed.mailbox import FaultyMailbox, LocalTransport, RecordingMailbox
from weft.distributed.virtual import die
from weft.errors import DeadlineError, UsageError

KINDS: dict[str, contract.Runner] = {
    "local": run_local,
    "virtual": run_in_virtual_time,
    "tcp": partial(run_sockets, kind="tcp"),
    "shared_memory": partial(run_sockets, kind="shared_memory"),
}


@pytest.mark.parametrize("program", contract.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_the_contract(kind: str, program: contract.Program) -> None:
    contract.check_kind(program, KINDS[kind], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_more_peers(kind: str) -> None:
    contract.check_kind(contract.any_source, KINDS[kind], 8)


@pytest.mark.parametrize("wrap", [RecordingMailbox, partial(FaultyMailbox, faults=(), die=die)], ids=["rec", "faulty"])
@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_wrappers_change_nothing(kind: str, wrap: Wrap) -> None:
    run = run_local if kind == "local" else run_in_virtual_time
    for program in contract.PROGRAMS:
        contract.check_kind(program, partial(run, wrap=wrap), 3)


@pytest.mark.parametrize(("fault", "program"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_broken_mailbox_is_caught(
    fault: type[BrokenMailbox], program: contract.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 0.5)
    with pytest.raises((AssertionError, DeadlineError)):
        contract.check_kind(program, partial(run_local, wrap=fault), 3)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"virtual"}))
def test_closing_ends_all_waiting(kind: str) -> None:
    def program(setup: contract.Setup) -> list[str]:
        mailbox = setup.open()
        threading.Timer(0.02, mailbox.close).start()
        with pytest.raises(UsageError, match="mailbox is closed"):
            mailbox.receive("never")
        mailbox.close()
        return []

    contract.check_kind(program, KINDS[kind], 1)


def test_an_address_is_given_once() -> None:
    transport = LocalTransport()
    mailbox = transport.open(3)
    with pytest.raises(UsageError, match="address is taken"):
        transport.open(3)
    mailbox.close()
    transport.open(3).close()
