"""A rank's weights between its worker and its responder: who may change them when, and what a replay holds back."""

import torch
from torch import Tensor

from weft.distributed.codecs import PackedTensors, write
from weft.distributed.consistency.control import Journal, Outgoing
from weft.distributed.consistency.pairs.events import (
    Event,
    Look,
    Pair,
    Step,
)
from weft.distributed.consistency.pairs.protocol import Tag
from weft.distributed.consistency.pairs.weights import Request, SharedWeights

PARAMETERS = {"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.float64), "c": torch.full((1,), 4.0)}


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def make_shared(*replayed: Event) -> SharedWeights:
    shared = SharedWeights(1)
    shared.begin(0, PackedTensors(PARAMETERS, empty), Journal(None, {}), replayed)
    return shared


def ask(turn: int = 0, run: int = 0, value: float = 2.0) -> Request:
    return Request(2, run, Pair(2, turn), [torch.full((7,), value), torch.full((2,), value, dtype=torch.float64)])


def tags(answers: list[Outgoing]) -> list[str]:
    return [answer.tag for answer in answers]


def test_weights_lie_flat_by_type() -> None:
    weights = PackedTensors(PARAMETERS, empty)
    assert [flat.tolist() for flat in weights.messages] == [[0.0] * 6 + [4.0], [1.0, 1.0]]
    copy = {name: torch.zeros_like(tensor) for name, tensor in PARAMETERS.items()}
    write(copy, weights.tensors)
    assert all(torch.equal(copy[name], tensor) for name, tensor in PARAMETERS.items())


def test_a_pair_moves_both_sides_to_the_mean() -> None:
    shared = make_shared()
    (answer,) = shared.serve([ask()])
    (view,) = shared.serve([Request(0, 0, Look(0))])
    assert (answer.to, answer.tag, view.tag) == (2, Tag.PAIRED, Tag.VIEW)
    for theirs, mine in zip(answer.tensors, view.tensors, strict=True):
        assert torch.equal(theirs, mine)
    assert answer.tensors[0].tolist() == [1.0] * 6 + [3.0] and answer.tensors[1].tolist() == [1.5, 1.5]


def test_the_bytes_of_answers_are_counted_for_the_rank_that_gives_them() -> None:
    """Once, they were counted nowhere."""
    shared = make_shared()
    shared.serve([ask(), ask(turn=1)])
    assert shared.take_answered_bytes() == 2 * (7 * 4 + 2 * 8)
    assert shared.take_answered_bytes() == 0


def test_pairs_wait_for_the_end_of_a_step() -> None:
    shared, step = make_shared(), Step(0)
    assert shared.begin_step(step)
    assert shared.serve([ask()]) == []
    assert shared.end_step({name: tensor + 1 for name, tensor in PARAMETERS.items()}, step)
    (answer,) = shared.serve()
    assert answer.tensors[0].tolist() == [1.5] * 6 + [3.5]
    assert not shared.begin_step(Step(1)) or not shared.end_step(PARAMETERS, Step(1))


def test_who_comes_early_waits_and_who_comes_late_is_not_heard() -> None:
    shared = make_shared()
    assert shared.serve([ask(run=1)]) == []
    shared.begin(1, PackedTensors(PARAMETERS, empty), Journal(None, {}))
    assert tags(shared.serve([ask(turn=1, run=0)])) == [Tag.PAIRED]


def test_what_does_not_fit_is_refused() -> None:
    shared = make_shared()
    assert shared.serve([Request(2, 0, Pair(2, 0), [torch.zeros(3)])]) == []
    assert shared.num_malformed == 1


def test_a_replay_keeps_its_order() -> None:
    """The step comes after two pairs, whichever is here first; then the worker is told."""
    shared = make_shared(Pair(3, 5), Pair(2, 0), Step(0), Look(0))
    assert not shared.begin_step(Step(0))
    assert shared.serve([Request(0, 0, Look(0))]) == [] and shared.serve([ask()]) == []
    answers = shared.serve([Request(3, 0, Pair(3, 5), ask(value=0.0).tensors)])
    assert [(answer.to, answer.tag) for answer in answers] == [(3, Tag.PAIRED), (2, Tag.PAIRED), (1, Tag.GO)]
    assert shared.begin_step(Step(0)) and shared.end_step(PARAMETERS, Step(0))
    assert tags(shared.serve()) == [Tag.VIEW]
