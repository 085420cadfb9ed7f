"""Faults on purpose, in virtual time, at exact places."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.distributed.group import AbstractGroup, Delay, Drop, Kill, SlowLink, SlowRank
from weft.distributed.mailbox import LEFT, AbstractMailbox, Duplicate, FaultyMailbox, MailFault, VirtualMailbox
from weft.distributed.virtual import VirtualResult, die, run_virtual
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel

INSTANT = NetworkModel(Link(0.0, 0.0))


def run(program: Callable[[AbstractMailbox], Any], faults: Sequence[MailFault], size: int = 2) -> VirtualResult:
    def rank_program(group: AbstractGroup) -> Any:
        mailbox = FaultyMailbox(VirtualMailbox(group), faults, die=die)
        mailbox.await_peers(range(size))
        return program(mailbox)

    return run_virtual(rank_program, size, network=INSTANT, notice=1.0)


def three_pushes(mailbox: AbstractMailbox) -> list[tuple[float, int, float]] | None:
    """What arrives at peer 0 within 10 s: when, its number, its value."""
    if mailbox.address == 1:
        for number in range(3):
            mailbox.send(0, "push", {"number": number}, [torch.zeros(2)])
        return None
    arrived = []
    mailbox.clock.wait_until(0.0)
    receive = mailbox.start_receive("push")
    while receive_or_none(receive, 10.0):
        message = receive.wait()
        arrived.append((mailbox.clock.now(), message.header["number"], float(message.tensors[0][0])))
        receive = mailbox.start_receive("push")
    return arrived


def receive_or_none(receive: Any, deadline: float) -> bool:
    try:
        receive.wait(deadline)
    except Exception:
        return False
    return True


def test_without_faults_all_arrive() -> None:
    assert run(three_pushes, []).results[0] == [(0.0, 0, 0.0), (0.0, 1, 0.0), (0.0, 2, 0.0)]


def test_a_message_is_dropped() -> None:
    assert run(three_pushes, [Drop(1, first_call=1)]).results[0] == [(0.0, 0, 0.0), (0.0, 2, 0.0)]


def test_a_message_comes_twice() -> None:
    numbers = [number for _, number, _ in run(three_pushes, [Duplicate(1, first_call=1)]).results[0]]
    assert numbers == [0, 1, 1, 2]


def test_a_message_is_late_and_those_behind_it() -> None:
    assert [at for at, _, _ in run(three_pushes, [Delay(1, 2.5, first_call=1)]).results[0]] == [0.0, 2.5, 2.5]


def test_a_link_is_slow_for_one_peer_alone() -> None:
    faults = [SlowLink(1, peer=0, seconds=1.0, seconds_per_byte=0.25)]
    assert [at for at, _, _ in run(three_pushes, faults).results[0]] == [3.0, 6.0, 9.0]
    assert [at for at, _, _ in run(three_pushes, [SlowLink(1, peer=5, seconds=1.0)]).results[0]] == [0.0] * 3


def test_a_slow_peer_computes_slowly() -> None:
    def program(mailbox: AbstractMailbox) -> float:
        mailbox.clock.charge(2.0)
        return mailbox.clock.now()

    assert run(program, [SlowRank(1, 3.0)]).results == (2.0, 6.0)


def test_a_peer_dies_at_a_message_and_is_named() -> None:
    def program(mailbox: AbstractMailbox) -> Any:
        if mailbox.address == 1:
            return three_pushes(mailbox)
        mailbox.follow_peers()
        tags = [mailbox.receive(("push", LEFT)).tag for _ in range(3)]
        return tags, mailbox.clock.now()

    assert run(program, [Kill(1, at_call=2)]).results == ((["push", "push", LEFT], 1.0), None)


def test_a_peer_dies_while_it_waits() -> None:
    def program(mailbox: AbstractMailbox) -> Any:
        if mailbox.address == 1:
            mailbox.receive("never", deadline=100.0)
        mailbox.follow_peers()
        note = mailbox.receive(LEFT)
        return note.source, note.header["reason"], mailbox.clock.now()

    assert run(program, [Kill(1, after_seconds=40.0)]).results == ((1, "it died", 41.0), None)
