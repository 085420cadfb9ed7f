"""The coordinator of a run: work is given out once, sums are of those who are left, what makes no sense is refused."""

import pytest
import torch

from weft.distributed.consistency.control import MalformedError, Outgoing
from weft.distributed.consistency.pairs.protocol import Tag
from weft.distributed.consistency.pairs.responder import WorkCoordinator, respond
from weft.distributed.consistency.pairs.weights import SharedWeights
from weft.distributed.mailbox import LocalTransport, Message


def message(source: int, tag: str, *, value: float | None = None, run: int = 0, **header: object) -> Message:
    return Message(source, tag, {"run": run, **header}, () if value is None else (torch.tensor([value]),))


def begun(size: int = 3) -> WorkCoordinator:
    coordinator = WorkCoordinator(size)
    assert coordinator.take(message(0, Tag.BEGIN, first=6)) == []
    return coordinator


def works(answers: list[Outgoing]) -> list[tuple[int, int, bool]]:
    return [(answer.to, answer.header["work"], answer.header["stop"]) for answer in answers]


def test_work_goes_to_whoever_asks_until_all_are_stopped() -> None:
    coordinator = begun()
    assert works(coordinator.take(message(2, Tag.DEAL, turn=0))) == [(2, 6, False)]
    assert works(coordinator.take(message(1, Tag.DEAL, turn=0))) == [(1, 7, False)]
    assert coordinator.take(message(0, Tag.STOP)) == []
    assert works(coordinator.take(message(2, Tag.DEAL, turn=1))) == [(2, 8, True)]


def test_who_asks_before_rank_0_has_begun_is_answered_then() -> None:
    coordinator = WorkCoordinator(2)
    assert coordinator.take(message(1, Tag.DEAL, turn=0)) == []
    assert works(coordinator.take(message(0, Tag.BEGIN, first=0))) == [(1, 0, False)]


def test_sums_are_of_those_who_are_left() -> None:
    coordinator = begun()
    assert coordinator.take(message(0, Tag.SUM, value=1.0, number=1)) == []
    assert coordinator.take(message(2, Tag.SUM, value=5.0, number=1)) == []
    answers = coordinator.lose(1)
    assert [answer.to for answer in answers] == [0, 2]
    assert all(answer.tensors[0].item() == 6.0 for answer in answers)


@pytest.mark.parametrize(
    "wrong",
    [
        message(1, Tag.DEAL, turn=0, run=-1),
        message(1, Tag.DEAL),
        message(1, Tag.SUM, number=1),
        message(1, "hello"),
        message(1, Tag.DEAL, turn=0),  # again
    ],
)
def test_what_makes_no_sense_is_refused(wrong: Message) -> None:
    coordinator = begun()
    coordinator.take(message(1, Tag.DEAL, turn=0))
    with pytest.raises(MalformedError):
        coordinator.take(wrong)


def test_a_responder_counts_what_it_refuses_and_ends_with_its_worker() -> None:
    post = LocalTransport()
    responder, worker, other, stranger = (post.open(address) for address in (3, 1, 0, 9))
    responder.follow_peers()
    stranger.send(3, Tag.ASK, {"run": 0, "turn": 0})
    worker.send(3, Tag.DEAL, {"run": 0, "turn": 0})  # only that of rank 0 coordinates
    worker.send(3, Tag.ASK, {"run": "first", "turn": 0})
    worker.close()
    assert respond(responder, SharedWeights(1), 2) == {"unknown rank": 1, "malformed": 2}
    for mailbox in (responder, other, stranger):
        mailbox.close()
