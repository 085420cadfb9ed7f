"""The books of a run: work is given out once, sums are of those who are left, and what makes no sense is refused."""

import pytest
import torch

from weft.distributed.consistency.pairs.books import Books
from weft.distributed.consistency.pairs.desk import keep_desk
from weft.distributed.consistency.pairs.protocol import Letter, Tag
from weft.distributed.consistency.pairs.slot import Slot
from weft.distributed.consistency.server.protocol import MalformedError
from weft.distributed.mailbox import LocalTransport, Message


def message(source: int, tag: str, *, value: float | None = None, run: int = 0, **header: object) -> Message:
    return Message(source, tag, {"run": run, **header}, () if value is None else (torch.tensor([value]),))


def begun(size: int = 3) -> Books:
    books = Books(size)
    assert books.take(message(0, Tag.BEGIN, first=6)) == []
    return books


def works(letters: list[Letter]) -> list[tuple[int, int, bool]]:
    return [(letter.to, letter.header["work"], letter.header["stop"]) for letter in letters]


def test_work_goes_to_whoever_asks_until_all_are_stopped() -> None:
    books = begun()
    assert works(books.take(message(2, Tag.DEAL, turn=0))) == [(2, 6, False)]
    assert works(books.take(message(1, Tag.DEAL, turn=0))) == [(1, 7, False)]
    assert books.take(message(0, Tag.STOP)) == []
    assert works(books.take(message(2, Tag.DEAL, turn=1))) == [(2, 8, True)]


def test_who_asks_before_rank_0_has_begun_is_answered_then() -> None:
    books = Books(2)
    assert books.take(message(1, Tag.DEAL, turn=0)) == []
    assert works(books.take(message(0, Tag.BEGIN, first=0))) == [(1, 0, False)]


def test_sums_are_of_those_who_are_left() -> None:
    books = begun()
    assert books.take(message(0, Tag.SUM, value=1.0, number=1)) == []
    assert books.take(message(2, Tag.SUM, value=5.0, number=1)) == []
    letters = books.lose(1)
    assert [letter.to for letter in letters] == [0, 2]
    assert all(letter.tensors[0].item() == 6.0 for letter in letters)


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
    books = begun()
    books.take(message(1, Tag.DEAL, turn=0))
    with pytest.raises(MalformedError):
        books.take(wrong)


def test_a_desk_counts_what_it_refuses_and_ends_with_its_worker() -> None:
    post = LocalTransport()
    desk, worker, other, stranger = (post.open(address) for address in (3, 1, 0, 9))
    desk.follow_peers()
    stranger.send(3, Tag.ASK, {"run": 0, "turn": 0})
    worker.send(3, Tag.DEAL, {"run": 0, "turn": 0})  # only rank 0 keeps books
    worker.send(3, Tag.ASK, {"run": "first", "turn": 0})
    worker.close()
    assert keep_desk(desk, Slot(1), 2) == {"unknown rank": 1, "malformed": 2}
    for mailbox in (desk, other, stranger):
        mailbox.close()
