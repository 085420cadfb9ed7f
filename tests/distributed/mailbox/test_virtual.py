"""Mailboxes in virtual time: the price of messages, many peers, deaths, and waits that never end."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weft.distributed.group import AbstractGroup, RecordingGroup, SoloGroup
from weft.distributed.mailbox import JOINED, LEFT, VirtualMailbox
from weft.distributed.virtual import die, run_virtual
from weft.errors import PeerLostError, TrainingError, UsageError
from weft.planning.cluster import Link
from weft.planning.network import NetworkModel

SECOND_PER_BYTE = NetworkModel(Link(alpha=100.0, beta=1.0))


def test_a_message_takes_what_its_bytes_take() -> None:
    """Header {} is 2 bytes, the tensor 8; the second message waits for the first at the sender's port."""

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 1:
            works = [mailbox.start_send(0, "push", {}, [torch.ones(2)]) for _ in range(2)]
            assert not works[0].is_done()
            works[1].wait()
            return group.clock.now(), works[0].is_done()
        mailbox.receive("push")
        first = group.clock.now()
        mailbox.receive("push")
        return first, group.clock.now()

    result = run_virtual(program, 2, network=SECOND_PER_BYTE, timeout=1e6)
    assert result.results == ((110.0, 120.0), (20.0, True))
    assert (result.num_messages, result.bytes_sent) == (2, (0, 20))


def serve_all(group: AbstractGroup) -> Any:
    """Rank 0 adds up what all others push, and answers each."""
    mailbox = VirtualMailbox(group)
    if group.rank:
        mailbox.await_peers({0})
        for step in range(3):
            group.clock.charge(0.001 * (group.rank % 7 + 1))
            mailbox.send(0, "push", {"step": step}, [torch.full((4,), float(group.rank))])
            mailbox.receive("weights", 0)
        return None
    total, order = torch.zeros(4), []
    for _ in range(3 * (group.size - 1)):
        message = mailbox.receive("push")
        total += message.tensors[0]
        order.append(message.source)
        mailbox.start_send(message.source, "weights", {}, [total])
    return float(total[0]), order


@pytest.fixture
def one_core() -> Iterator[None]:
    """Of a thousand threads one runs: to wake it on another core takes longer than what it then does."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_core")
def test_a_thousand_peers() -> None:
    total, _ = run_virtual(serve_all, 1000).results[0]
    assert total == 3 * sum(range(1000))


def test_the_same_order_every_time() -> None:
    first, second = (run_virtual(serve_all, 20) for _ in range(2))
    assert first.results[0] == second.results[0]
    assert first.seconds == second.seconds


def test_messages_of_one_that_dies_arrive_before_the_news() -> None:
    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 1:
            mailbox.start_send(0, "push", {}, [torch.ones(1000)])
            die()
        mailbox.follow_peers()
        asked = mailbox.start_receive("never", 1)
        got = [mailbox.receive(("push", LEFT)).tag for _ in range(2)]
        with pytest.raises(PeerLostError, match="peer 1 is lost"):
            asked.wait()
        with pytest.raises(PeerLostError, match="peer 1 is lost"):
            mailbox.send(1, "push")
        return got, group.clock.now()

    result = run_virtual(program, 2, network=SECOND_PER_BYTE, notice=1.0, timeout=1e6)
    assert result.results[0] == (["push", LEFT], 4102.0)


def test_late_news_of_an_end_is_not_for_those_who_ask_the_next_life() -> None:
    """Peer 1 leaves with a message on its way until 4102, and is back before."""

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 1:
            mailbox.start_send(0, "push", {}, [torch.ones(1000)])
            mailbox.close()
            group.clock.wait_until(50.0)
            again = VirtualMailbox(group)
            group.clock.wait_until(5000.0)
            again.send(0, "answer")
            group.clock.wait_until(6000.0)
            return None
        before = mailbox.start_receive("answer", 1)
        group.clock.wait_until(60.0)
        after = mailbox.start_receive("answer", 1)
        with pytest.raises(PeerLostError, match="it left"):
            before.wait()
        before.cancel()
        return group.clock.now(), after.wait().incarnation

    result = run_virtual(program, 2, network=SECOND_PER_BYTE, timeout=1e6)
    assert result.results[0] == (4102.0, 2)


def test_two_lives_end_in_their_order() -> None:
    """The second life is over before the last message of the first has come."""

    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 1:
            group.clock.wait_until(1.0)
            mailbox.start_send(0, "push", {}, [torch.ones(1000)])
            mailbox.close()
            group.clock.wait_until(50.0)
            VirtualMailbox(group).close()
            return None
        mailbox.follow_peers()
        assert mailbox.receive(JOINED).incarnation == 1
        group.clock.wait_until(60.0)
        assert mailbox.receive("push", 1).incarnation == 1
        return [(note.tag, note.incarnation) for note in (mailbox.receive((JOINED, LEFT)) for _ in range(3))]

    result = run_virtual(program, 2, network=SECOND_PER_BYTE, timeout=1e6)
    assert result.results[0] == [(LEFT, 1), (JOINED, 2), (LEFT, 2)]


def test_a_message_for_an_earlier_life_is_refused_and_counted() -> None:
    def program(group: AbstractGroup) -> Any:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 1:
            mailbox.send(0, "push")
            return None
        group.clock.wait_until(50.0)
        mailbox.close()
        mailbox.close()
        again = VirtualMailbox(group)
        group.clock.wait_until(500.0)
        return again.poll("push"), again.refusals()

    assert run_virtual(program, 2, network=SECOND_PER_BYTE).results[0] == (None, {"late": 1})


def test_peers_that_wait_for_each_other_are_reported() -> None:
    def program(group: AbstractGroup) -> None:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank:
            mailbox.await_peers({7})
        mailbox.receive("push", 1)

    with pytest.raises(TrainingError, match=r"rank 0 waits for a message \(tag: push.*rank 1 waits for peer 7"):
        run_virtual(program, 2)


def test_a_rank_in_a_collective_waits_for_one_that_waits_for_mail() -> None:
    def program(group: AbstractGroup) -> str:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank == 0:
            mailbox.receive("go", 1)
        else:
            group.clock.wait_until(500.0)
            mailbox.send(0, "go")
        group.barrier()
        return "together"

    assert run_virtual(program, 2, timeout=60.0).results == ("together", "together")


def test_a_mailbox_needs_the_virtual_cluster_under_any_wrapper() -> None:
    with pytest.raises(UsageError, match=r"not of the virtual cluster \(SoloGroup\)"):
        VirtualMailbox(RecordingGroup(SoloGroup()))
    assert run_virtual(lambda group: VirtualMailbox(RecordingGroup(group)).address, 2).results == (0, 1)
    with pytest.raises(UsageError, match="address is taken"):
        run_virtual(lambda group: [VirtualMailbox(group), VirtualMailbox(group)], 1)


def test_messages_show_in_the_trace() -> None:
    def program(group: AbstractGroup) -> None:
        mailbox = VirtualMailbox(group)
        mailbox.await_peers({0, 1})
        if group.rank:
            mailbox.send(0, "push")
        else:
            mailbox.receive("push")

    spans = run_virtual(program, 2, network=SECOND_PER_BYTE, trace=True).trace
    assert [(span.rank, span.end) for span in spans if span.what == "send push"] == [(1, 102.0)]
