"""Host servers among workers and shards that die, come back, or write what they like."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.consistency.server.served import (
    Course,
    host_spec_of,
    make_parameters,
    spec_of,
    work_with_a_pause,
)
from weft.distributed.consistency.server import ServedReplicas, Summary, serve, serve_host, settings_of
from weft.distributed.consistency.server.protocol import ForwardHeader, InitHeader, PushHeader, Tag
from weft.distributed.mailbox import AbstractMailbox, LocalTransport
from weft.errors import UsageError
from weft.specs import parse_plan

PATIENCE = 10.0
COURSE = Course(parse_plan("data=2 consistency=async topology=server(inner=2)"))
SHARD, HOST = 2, 3
WEIGHTS = [p.detach() for p in make_parameters().values()]
ONES = [torch.ones_like(weight) for weight in WEIGHTS]


def start(mailbox: AbstractMailbox, body: Callable[[AbstractMailbox], Summary]) -> tuple[threading.Thread, list[Any]]:
    """A server in a thread; the list has its summary when all workers have left, or None if its mailbox was closed."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(body(mailbox))
        except UsageError:
            found.append(None)
        mailbox.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


@contextmanager
def serving(post: LocalTransport) -> Iterator[dict[int, list[Any]]]:
    """The shard and the host server; their summaries by address."""
    shard, of_shard = start(post.open(SHARD), lambda box: serve(box, spec_of(COURSE, 0)))
    host, of_host = start(post.open(HOST), lambda box: serve_host(box, host_spec_of(COURSE, 0)))
    yield {SHARD: of_shard, HOST: of_host}
    for thread in (shard, host):
        thread.join(PATIENCE)


@pytest.mark.parametrize("victim", [SHARD, HOST], ids=["shard", "host server"])
def test_what_dies_between_two_steps_is_restored_and_training_goes_on(victim: int, tmp_path: Path) -> None:
    """A shard goes on from its snapshot; a host server has nothing to keep."""
    course, post = replace(COURSE, run=tmp_path), LocalTransport()
    bodies: dict[int, Callable[[AbstractMailbox], Summary]] = {
        SHARD: lambda box: serve(box, spec_of(course, 0, tmp_path / "shard")),
        HOST: lambda box: serve_host(box, host_spec_of(course, 0, tmp_path / "begun")),
    }
    boxes = {address: post.open(address) for address in bodies}
    servers = {address: start(boxes[address], body) for address, body in bodies.items()}
    settings = settings_of(course.plan, course.make_optimizer())
    workers = [ServedReplicas(post.open(rank), settings, [0]) for rank in range(2)]
    gate, ends = threading.Barrier(3, timeout=PATIENCE), dict[int, Any]()

    def labour(rank: int) -> None:
        ends[rank] = work_with_a_pause(workers[rank], course, gate)["w1"]

    threads = [threading.Thread(target=labour, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    gate.wait()
    boxes[victim].close()
    servers[victim][0].join(PATIENCE)
    servers[victim] = start(post.open(victim), bodies[victim])
    gate.wait()
    for thread in threads:
        thread.join(PATIENCE)
    for worker in workers:
        worker._mailbox.close()
    for thread, _ in servers.values():
        thread.join(PATIENCE)
    assert torch.equal(ends[0], ends[1])
    record = {SHARD: "shard-0", HOST: "host-0"}[victim]
    assert '"restored"' in (tmp_path / f"decisions/seed-0/{record}.jsonl").read_text()
    assert servers[SHARD][1][0].updates > 0


def begin(post: LocalTransport) -> list[AbstractMailbox]:
    """Two workers that the shard has let go."""
    boxes: list[AbstractMailbox] = [post.open(rank) for rank in range(2)]
    boxes[0].send(SHARD, Tag.INIT, vars(InitHeader(0, 0, 1.0, len(WEIGHTS), 0, (), 0, None)), WEIGHTS)
    for box in boxes:
        box.send(SHARD, Tag.HELLO, {"run": 0, "step": None, "version": 0})
        box.receive(Tag.WELCOME, SHARD, deadline=box.clock.now() + PATIENCE)
    return boxes


@pytest.mark.parametrize(
    ("changes", "tensors", "reason"),
    [
        ({"lr": "fast"}, ONES, "malformed"),
        ({"in_part": True}, ONES, "malformed"),
        ({}, ONES[1:], "malformed"),
        ({}, [*ONES[:-1], torch.ones(2)], "malformed"),
        ({"run": 5, "counts": [1, 1]}, ONES, "malformed"),
        ({"step": 0}, ONES, "duplicate"),
    ],
)
def test_a_push_that_cannot_be_meant_is_refused_by_the_host_server(
    changes: dict[str, Any], tensors: list[torch.Tensor], reason: str
) -> None:
    post = LocalTransport()
    with serving(post) as found:
        boxes = begin(post)
        for number, given in enumerate((ONES, tensors, ONES)):
            header = vars(PushHeader(0, 2 * number, 0, 0.1, 0.5)) | {"seed": 0, "counts": [len(WEIGHTS)]}
            boxes[0].send(HOST, Tag.PUSH, header | (changes if number == 1 else {}), given)
            if number != 1:
                boxes[0].receive(Tag.WEIGHTS, HOST, deadline=boxes[0].clock.now() + PATIENCE)
        boxes[0].send(HOST, "gossip", {"run": 0})
        for box in boxes:
            box.close()
    assert found[HOST][0].refused == {reason: 1, "unknown tag": 1}
    assert found[HOST][0].updates == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": []}, "malformed"),
        ({"parts": [[0, 0, 0.5], [0, 0, 0.5]]}, "malformed"),
        ({"parts": [[0, 0, 2.0]]}, "malformed"),
        ({"parts": [[9, 0, 0.5]]}, "malformed"),
        ({"number": 0}, "duplicate"),
        ({"parts": [[0, 0, 0.5]]}, "duplicate"),
        ({"run": 3}, "late"),
    ],
)
def test_what_a_host_server_cannot_mean_is_refused_by_the_shard(changes: dict[str, Any], reason: str) -> None:
    """The first was joined of both ranks; the second is spoilt; the third is right again."""
    post = LocalTransport()
    thread, found = start(post.open(SHARD), lambda box: serve(box, spec_of(COURSE, 0)))
    boxes, host = begin(post), post.open(HOST)
    right = [[0, 0, 0.5], [1, 1, 0.5]], [[0, 2, 0.5]], [[1, 3, 0.5]]
    for number, parts in enumerate(right):
        header = vars(ForwardHeader(0, number, 0, 0.1, ())) | {"parts": parts}
        host.send(SHARD, Tag.FORWARD, header | (changes if number == 1 else {}), ONES)
        if number != 1:
            answer = host.receive(Tag.WEIGHTS, SHARD, deadline=host.clock.now() + PATIENCE)
            assert len(answer.header["releases"]) == len(parts)
    boxes[0].send(SHARD, Tag.FORWARD, {"run": 0})
    for box in (*boxes, host):
        box.close()
    thread.join(PATIENCE)
    assert found[0].refused == {reason: 1, "unknown rank": 1}
    assert found[0].updates == 2


def test_a_shard_that_was_restored_answers_a_host_server_whose_ranks_have_died(tmp_path: Path) -> None:
    """Its other ranks wait until what is under way is answered."""
    post, spec = LocalTransport(), spec_of(COURSE, 0, tmp_path / "shard")
    first = post.open(SHARD)
    thread, _ = start(first, lambda box: serve(box, spec))
    boxes, host = begin(post), post.open(HOST)
    first.close()
    thread.join(PATIENCE)
    boxes[1].close()
    thread, found = start(post.open(SHARD), lambda box: serve(box, spec))
    header = vars(ForwardHeader(0, 0, 0, 0.1, ((1, 1, 0.5),)))
    host.send(SHARD, Tag.FORWARD, header, ONES)
    assert host.receive(Tag.WEIGHTS, SHARD, deadline=host.clock.now() + PATIENCE).header["releases"] == []
    for box in (boxes[0], host):
        box.close()
    thread.join(PATIENCE)
    assert found[0].refused == {}
