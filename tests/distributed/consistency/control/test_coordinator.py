"""Who is left, what came early and what ranks add up: whoever coordinates them."""

import pytest
import torch

from weft.distributed.consistency.control import SUM, Coordinator, MalformedError, Outgoing, Sums, WorkQueue
from weft.distributed.mailbox import Message


def part(rank: int, *values: float, number: int = 1, **header: object) -> Message:
    return Message(rank, SUM, {"run": 0, "number": number, **header}, (torch.tensor(values),))


def begun(size: int = 3) -> Coordinator:
    coordinator = Coordinator(range(size))
    coordinator.begin(0)
    return coordinator


def totals(answers: list[Outgoing]) -> list[tuple[int, list[float]]]:
    return [(answer.to, [value for tensor in answer.tensors for value in tensor.tolist()]) for answer in answers]


def test_a_sum_is_added_in_the_order_of_ranks_whatever_came_first() -> None:
    coordinator = begun()
    assert coordinator.add(part(2, 1e8)) == [] and coordinator.add(part(0, 1.0)) == []
    found = totals(coordinator.add(part(1, -1e8)))
    expected = float(torch.tensor(1.0) + torch.tensor(-1e8) + torch.tensor(1e8))
    assert found == [(rank, [expected]) for rank in range(3)] and expected != 1.0


def test_all_parts_are_given_to_whoever_gathers() -> None:
    coordinator = begun(2)
    assert coordinator.add(part(1, 7.0, gather=True)) == []
    assert totals(coordinator.add(part(0, -0.0, gather=True))) == [(0, [-0.0, 7.0]), (1, [-0.0, 7.0])]


def test_the_loss_of_a_rank_completes_what_waits_for_it_alone() -> None:
    coordinator = begun()
    coordinator.add(part(0, 1.0, gather=True))
    coordinator.add(part(2, 5.0, gather=True))
    assert totals(coordinator.lose(1)) == [(0, [1.0, 5.0]), (2, [1.0, 5.0])]
    assert coordinator.has_ranks and coordinator.begin(1) == []
    assert totals(coordinator.add(part(0, 2.0))) == []
    assert totals(coordinator.add(part(2, 2.0))) == [(0, [4.0]), (2, [4.0])]  # it is not waited for in the next either


def test_a_sum_does_not_wait_for_a_rank_that_had_its_total_from_a_server_that_is_lost() -> None:
    sums = Sums()
    sums.add(1, 0, torch.tensor([5.0]))
    assert list(sums.take_whole({0, 1})) == []
    sums.add(2, 1, torch.tensor([7.0]))
    assert list(sums.take_whole({0, 1})) == [(1, {0: torch.tensor([5.0])})]


@pytest.mark.parametrize("wrong", [part(1, 1.0, 2.0), Message(1, SUM, {"number": 1}), part(1, 1.0, number=-1)])
def test_parts_that_do_not_fit_are_refused_and_counted(wrong: Message) -> None:
    coordinator = begun()
    coordinator.add(part(0, 1.0))
    with pytest.raises(MalformedError):
        coordinator.add(wrong)

    def handle(message: Message) -> None:
        coordinator.add(message)

    coordinator.admit(wrong, handle)
    assert coordinator.refused == {"malformed": 1}


def test_what_comes_early_is_given_when_its_training_begins() -> None:
    coordinator, early = Coordinator(range(2)), part(1, 1.0)
    coordinator.put_off(early)
    assert coordinator.begin(0) == [early] and coordinator.begin(1) == []


def test_work_is_dealt_out_once_and_never_before_where_it_was_skipped_to() -> None:
    work = WorkQueue(3)
    assert [work.take(), work.take()] == [3, 4]
    work.skip_to(9)
    work.skip_to(7)
    assert work.take() == 9
