"""The contract suite over every kind of mailbox, and the broken mailboxes that it must catch."""

import threading
from functools import partial

import pytest
import torch

from tests.distributed.mailbox import contract
from tests.distributed.mailbox.broken import FAULTS, BrokenMailbox
from tests.distributed.mailbox.peers import Wrap, run_in_virtual_time, run_local, run_sockets
from weft.distributed.mailbox import FaultyMailbox, LocalPost, RecordingMailbox
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


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"tcp"}))
def test_windows(kind: str) -> None:
    contract.check_kind(contract.windows, KINDS[kind], 3)


@pytest.mark.parametrize("kind", KINDS)
def test_more_peers(kind: str) -> None:
    contract.check_kind(contract.any_source, KINDS[kind], 8)


@pytest.mark.parametrize("wrap", [RecordingMailbox, partial(FaultyMailbox, faults=(), die=die)], ids=["rec", "faulty"])
@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_wrappers_change_nothing(kind: str, wrap: Wrap) -> None:
    run = run_local if kind == "local" else run_in_virtual_time
    for program in (*contract.PROGRAMS, contract.windows):
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
    def program(desk: contract.Desk) -> list[str]:
        mailbox = desk.open()
        threading.Timer(0.02, mailbox.close).start()
        with pytest.raises(UsageError, match="mailbox is closed"):
            mailbox.receive("never")
        mailbox.close()
        return []

    contract.check_kind(program, KINDS[kind], 1)


def test_closing_ends_the_waiting_for_a_window() -> None:
    mailbox = LocalPost().open(0)
    threading.Timer(0.02, mailbox.close).start()
    with pytest.raises(UsageError, match="mailbox is closed"):
        mailbox.window(0, "never", mailbox.clock.now() + 10)


def test_an_address_is_given_once() -> None:
    post = LocalPost()
    mailbox = post.open(3)
    with pytest.raises(UsageError, match="address is taken"):
        post.open(3)
    mailbox.close()
    post.open(3).close()


def test_tcp_has_no_windows() -> None:
    def program(desk: contract.Desk) -> list[str]:
        mailbox = desk.open()
        with pytest.raises(UsageError, match="TCP has no windows"):
            mailbox.expose("weights", torch.ones(2))
        with pytest.raises(UsageError, match="TCP has no windows"):
            mailbox.window(0, "weights")
        return []

    contract.check_kind(program, KINDS["tcp"], 1)
