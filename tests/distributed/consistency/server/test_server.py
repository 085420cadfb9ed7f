"""A server among workers that write what they like, die, come back; and one that dies itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.consistency.server.served import Course, make_parameters, spec_of, work, work_with_a_pause
from weft.distributed.consistency.server import ServedReplicas, Summary, serve, settings_of
from weft.distributed.consistency.server.protocol import InitHeader, PushHeader, Tag
from weft.distributed.mailbox import AbstractMailbox, LocalTransport, Message
from weft.distributed.placement.cut import cut_evenly
from weft.errors import UsageError
from weft.specs import parse_plan

PATIENCE = 10.0


@contextmanager
def serving(post: LocalTransport, course: Course, kept: Path | None = None) -> Iterator[list[Summary]]:
    """One server in a thread; its summary is in the list when all workers have left."""
    mailbox = post.open(course.plan.num_ranks)
    found: list[Summary] = []

    def body() -> None:
        found.append(serve(mailbox, spec_of(course, 0, kept)))
        mailbox.close()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield found
    finally:
        thread.join(PATIENCE)


class Hand:
    """A worker by hand: it writes headers of its own."""

    def __init__(self, post: LocalTransport, course: Course, rank: int) -> None:
        self.mailbox: AbstractMailbox = post.open(rank)
        self.server = course.plan.num_ranks
        self.weights = [p.detach() for p in make_parameters().values()]

    def init(self, **changes: Any) -> None:
        header = vars(InitHeader(0, 0, 1.0, len(self.weights), 0, (), 0, None)) | changes
        self.mailbox.send(self.server, Tag.INIT, header, self.weights)

    def hello(self, **changes: Any) -> Message:
        self.mailbox.send(self.server, Tag.HELLO, {"run": 0, "step": None, "version": 0} | changes)
        return self.receive(Tag.WELCOME)

    def push(self, number: int, **changes: Any) -> None:
        header = vars(PushHeader(0, number, 0, 0.1, 0.5)) | changes
        self.mailbox.send(self.server, Tag.PUSH, header, [torch.ones_like(weight) for weight in self.weights])

    def receive(self, tag: Tag) -> Message:
        return self.mailbox.receive(tag, self.server, deadline=self.mailbox.clock.now() + PATIENCE)


ASYNC = Course(parse_plan("data=2 consistency=async topology=server"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lr": "fast"}, "malformed"),
        ({"lr": -1.0}, "malformed"),
        ({"weight": 2.0}, "malformed"),
        ({"step": True}, "malformed"),
        ({"absent": [0]}, "malformed"),
        ({"absent": "all"}, "malformed"),
        ({"in_part": True}, "malformed"),
        ({"wants": 1}, "malformed"),
        ({"run": 7}, "late"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_counted(changes: dict[str, Any], reason: str) -> None:
    post = LocalTransport()
    with serving(post, ASYNC) as found:
        hand, other = Hand(post, ASYNC, 0), Hand(post, ASYNC, 1)
        hand.init()
        hand.hello()
        hand.push(0, **changes)
        hand.push(0)  # goes on all the same
        assert hand.receive(Tag.WEIGHTS).header["version"] == 1
        for one in (hand, other):
            one.mailbox.close()
    assert found[0].refused == {reason: 1}


def test_strangers_doubles_and_unknown_tags_are_refused_and_counted() -> None:
    post = LocalTransport()
    with serving(post, ASYNC) as found:
        hand, other, stranger = (Hand(post, ASYNC, rank) for rank in (0, 1, 9))
        other.init()
        hand.init()
        hand.init()
        hand.hello()
        stranger.push(0)
        hand.mailbox.send(hand.server, "gossip", {"run": 0})
        hand.push(0)
        hand.receive(Tag.WEIGHTS)
        hand.push(0)
        for one in (hand, other, stranger):
            one.mailbox.close()
    assert found[0].refused == {"duplicate": 2, "malformed": 1, "unknown rank": 1, "unknown tag": 1}
    assert found[0].updates == 1


@pytest.mark.parametrize("changes", [{"slots": "none"}, {"num_pieces": 9}, {"fraction": None}, {"run": -1}])
def test_a_beginning_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    post = LocalTransport()
    with serving(post, ASYNC) as found:
        hand, other = Hand(post, ASYNC, 0), Hand(post, ASYNC, 1)
        hand.init(**changes)
        hand.init()
        assert hand.hello().header["version"] == 0
        for one in (hand, other):
            one.mailbox.close()
    assert found[0].refused == {"malformed": 1}


ELASTIC = Course(parse_plan("data=2 consistency=elastic(1) topology=server"))


@pytest.mark.parametrize("course", [ASYNC, ELASTIC], ids=["async", "elastic"])
def test_a_worker_that_returns_gets_the_current_weights(course: Course) -> None:
    post = LocalTransport()
    with serving(post, course) as found:
        hand, other = Hand(post, course, 0), Hand(post, course, 1)
        hand.init()
        hand.hello()
        other.hello()
        hand.push(0)
        hand.receive(Tag.WEIGHTS)
        other.mailbox.close()
        returned = Hand(post, course, 1)
        welcome = returned.hello()
        assert welcome.header["version"] == 1
        assert not torch.equal(welcome.tensors[0], returned.weights[0])
        returned.push(int(welcome.header["step"]))
        assert returned.receive(Tag.WEIGHTS).header["version"] == 2
        for one in (hand, returned):
            one.mailbox.close()
    assert found[0].returned == 1


def test_who_returns_when_the_others_have_ended_is_late() -> None:
    """It would be waited for in a sum that it knows nothing of, and itself wait in one that is over."""
    post = LocalTransport()
    with serving(post, ASYNC) as found:
        hand, other = Hand(post, ASYNC, 0), Hand(post, ASYNC, 1)
        hand.init()
        hand.hello()
        other.mailbox.close()
        hand.mailbox.send(hand.server, Tag.SUM, {"run": 0, "number": 1}, [torch.ones(1)])
        hand.receive(Tag.TOTAL)
        returned = post.open(1)
        returned.send(hand.server, Tag.HELLO, {"run": 0, "step": None, "version": 0})
        hand.mailbox.send(hand.server, Tag.SUM, {"run": 0, "number": 2}, [torch.ones(1)])
        assert hand.receive(Tag.TOTAL).header["number"] == 2
        for mailbox in (hand.mailbox, returned):
            mailbox.close()
    assert found[0].refused == {"late": 1} and found[0].returned == 0


@pytest.mark.parametrize(("scheme", "num_lost"), [("stale(0)", 3), ("elastic(1)", 6)])
def test_a_server_that_dies_is_restored_and_says_what_was_lost(scheme: str, num_lost: int, tmp_path: Path) -> None:
    """The server is killed between two steps of both workers; its successor has the snapshot from the beginning."""
    course = replace(ASYNC, plan=parse_plan(f"data=2 consistency={scheme} topology=server"), run=tmp_path)
    post, kept = LocalTransport(), tmp_path / "shard"
    box = post.open(2)
    done: list[str] = []

    def doomed() -> None:
        with pytest.raises(UsageError, match="mailbox is closed"):
            serve(box, spec_of(course, 0, kept))
        done.append("dead")

    first = threading.Thread(target=doomed)
    first.start()
    settings = settings_of(course.plan, course.make_optimizer())
    workers = [ServedReplicas(post.open(rank), settings, [0]) for rank in range(2)]
    gate, found = threading.Barrier(3, timeout=PATIENCE), dict[int, Any]()

    def labour(rank: int) -> None:
        found[rank] = work_with_a_pause(workers[rank], course, gate)

    threads = [threading.Thread(target=labour, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    gate.wait()
    box.close()
    first.join(PATIENCE)
    with serving(post, course, kept) as summaries:
        gate.wait()
        for thread in threads:
            thread.join(PATIENCE)
        for worker in workers:
            worker._mailbox.close()
    assert done == ["dead"]
    assert summaries[0].lost == num_lost
    assert torch.equal(found[0]["w1"], found[1]["w1"])
    assert '"restored"' in (tmp_path / "decisions/seed-0/shard-0.jsonl").read_text()


@contextmanager
def lost(post: LocalTransport, course: Course, kept: Path) -> Iterator[None]:
    """A server that is gone when the block ends."""
    box = post.open(course.plan.num_ranks)

    def body() -> None:
        with pytest.raises(UsageError, match="mailbox is closed"):
            serve(box, spec_of(course, 0, kept))

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield
    finally:
        box.close()
        thread.join(PATIENCE)


def test_a_push_whose_first_part_died_with_a_server_is_answered(tmp_path: Path) -> None:
    """It was once refused as malformed, and its rank waited for ever."""
    post = LocalTransport()
    with lost(post, ASYNC, tmp_path / "shard"):
        hand, other = Hand(post, ASYNC, 0), Hand(post, ASYNC, 1)
        hand.init()
        hand.hello()
        hand.mailbox.send(hand.server, Tag.PART, {"run": 0, "step": 0}, hand.weights)
    with serving(post, ASYNC, tmp_path / "shard") as found:
        hand.mailbox.send(hand.server, Tag.PUSH, vars(PushHeader(0, 0, 0, 0.1, 0.5, in_part=True)))
        answer = hand.receive(Tag.WEIGHTS)
        assert (answer.header["step"], len(answer.tensors)) == (2, len(hand.weights))
        for one in (hand, other):
            one.mailbox.close()
    assert found[0].refused == {}


def test_a_push_that_wants_no_weights_and_comes_twice_leaves_the_next_answer_whole() -> None:
    """The second was refused, and yet took the weights out of the next answer."""
    post = LocalTransport()
    with serving(post, ASYNC) as found:
        hand, other = Hand(post, ASYNC, 0), Hand(post, ASYNC, 1)
        hand.init()
        hand.hello()
        for _ in range(2):
            hand.push(0, wants=False)
        assert hand.receive(Tag.WEIGHTS).tensors == ()
        hand.push(2)
        assert len(hand.receive(Tag.WEIGHTS).tensors) == len(hand.weights)
        for one in (hand, other):
            one.mailbox.close()
    assert found[0].refused == {"duplicate": 1}


def test_one_worker_after_another_training_begins_anew() -> None:
    """Two seeds: the second begins with its own weights, and nothing of the first is left."""
    course = replace(ASYNC, plan=parse_plan("data=2 consistency=stale(0) topology=server"), num_steps=3)
    post, found = LocalTransport(), dict[tuple[int, int], Any]()
    settings = settings_of(course.plan, course.make_optimizer())

    def labour(rank: int) -> None:
        mailbox = post.open(rank)
        replicas = ServedReplicas(mailbox, settings, [0, 1])
        for seed in range(2):
            found[rank, seed] = work(replicas, course, lambda seconds: None)
        mailbox.close()

    with serving(post, course):
        threads = [threading.Thread(target=labour, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert all(torch.equal(found[0, 0]["w1"], found[key]["w1"]) for key in found)
    assert len(found) == 4


def test_every_piece_has_a_place() -> None:
    pieces = cut_evenly(make_parameters(), 2)
    assert len(pieces) == 2 and all(pieces)
