"""A shard without transport: what updates are made of."""

import pytest
import torch
from torch import Tensor

from weft.distributed.consistency.server import Contribution, Shard
from weft.distributed.consistency.server.shard import Rate
from weft.training.gradients import clip_by_norm
from weft.training.optimizers import OPTIMIZERS, SGD, Adam, Momentum, Optimizer, TorchOptimizer


def make_shard(rate: Rate = "full", rule: object = None, **options: object) -> Shard:
    optimizer = Optimizer(rule or SGD(), lr=1.0)  # type: ignore[arg-type]
    return Shard([torch.zeros(3), torch.zeros(2)], optimizer, rate=rate, num_workers=2, **options)  # type: ignore[arg-type]


def give(
    rank: int = 0, value: float = 1.0, *, version: int = 0, weight: float = 0.5, absent: tuple[int, ...] = ()
) -> Contribution:
    tensors: list[Tensor | None] = [torch.full((3,), value), torch.full((2,), value)]
    found = tuple(None if i in absent else tensor for i, tensor in enumerate(tensors))
    return Contribution(rank, 0, version, weight, 1.0, found)


@pytest.mark.parametrize(("rate", "moved"), [("full", -1.0), ("share", -0.5), ("staleness", -1.0)])
def test_one_gradient_is_one_update_at_its_rate(rate: Rate, moved: float) -> None:
    shard = make_shard(rate)
    shard.commit([give()])
    assert shard.version == 1
    assert all(torch.equal(piece, torch.full_like(piece, moved)) for piece in shard.weights)


def test_an_old_gradient_counts_less_by_its_staleness() -> None:
    shard = make_shard("staleness")
    for _ in range(4):
        shard.commit([give(value=0.0)])
    shard.commit([give(version=0)])
    assert shard.weights[0].tolist() == [-0.25] * 3
    assert shard.staleness == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}


def test_a_round_is_one_update_of_the_weighted_sum() -> None:
    shard = make_shard("together")
    shard.commit([give(0, 1.0, weight=0.25), give(1, 3.0, weight=0.75)])
    assert shard.weights[0].tolist() == [-2.5] * 3
    assert int(shard.state.shared.step) == 1


def test_where_some_are_missing_the_weights_of_the_rest_sum_to_one() -> None:
    shard = make_shard("together")
    shard.commit([give(1, 3.0, weight=0.25)])
    assert shard.weights[0].tolist() == [-3.0] * 3


def test_what_only_some_have_counts_as_zeros_and_what_nobody_has_is_left_alone() -> None:
    shard = make_shard("together", Momentum())
    shard.commit([give(0, 1.0), give(1, 1.0)])
    before = shard.weights[1].clone()
    shard.commit([give(0, 1.0, absent=(1,)), give(1, 1.0, absent=(1,))])
    assert torch.equal(shard.weights[1], before)  # not even by momentum
    shard.commit([give(0, 1.0, absent=(1,)), give(1, 1.0)])
    assert not torch.equal(shard.weights[1], before)


@pytest.mark.parametrize("rate", ["together", "full"])
def test_nothing_at_all_is_an_update_without_effect(rate: Rate) -> None:
    shard = make_shard(rate, Adam())
    shard.commit([give(weight=0.0, absent=(0, 1))])
    assert shard.version == 1
    assert int(shard.state.shared.step) == 0


def test_differences_are_added() -> None:
    shard = make_shard("share", form="difference")
    shard.commit([give(value=2.0)])
    assert shard.weights[0].tolist() == [1.0] * 3


def test_the_sum_of_a_round_is_clipped() -> None:
    shard = make_shard("together", clip_norm=0.1)
    shard.commit([give(0, 1.0), give(1, 3.0)])
    clipped = clip_by_norm({"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0)}, 0.1)
    assert clipped["a"] is not None
    assert torch.equal(shard.weights[0], -clipped["a"])


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"torch"}))
def test_rounds_of_all_have_the_bits_of_an_optimizer_on_the_sum(name: str) -> None:
    parameter, optimizer = torch.randn(7), OPTIMIZERS[name]()
    shard = Shard([parameter.clone()], OPTIMIZERS[name](), rate="together", num_workers=2)
    state = optimizer.init({"w": parameter})
    for step in range(10):
        first, second = torch.randn(7), torch.randn(7)
        state = optimizer.update({"w": first * 0.5 + second * 0.5}, {"w": parameter}, state, 0.01)
        shard.commit([Contribution(rank, step, step, 0.5, 0.01, (g,)) for rank, g in enumerate((first, second))])
    assert torch.equal(shard.weights[0], parameter)


def test_lost_momentum_shows() -> None:
    """The planted fault: a shard that forgets its optimizer state does not follow the one that keeps it."""
    shards = [make_shard("together", Momentum()) for _ in range(2)]
    for _ in range(3):
        for shard in shards:
            shard.commit([give(0), give(1)])
        shards[1].state = Optimizer(Momentum(), lr=1.0).init({str(i): w for i, w in enumerate(shards[1].weights)})
    assert not torch.equal(shards[0].weights[0], shards[1].weights[0])


def test_a_shard_is_restored_with_its_momentum() -> None:
    shard, heir = make_shard("full", Momentum()), make_shard("full", Momentum())
    shard.commit([give()])
    heir.restore(shard.weights, shard.state, shard.version)
    for one in (shard, heir):
        one.commit([give()])
    assert heir.version == 2
    assert torch.equal(shard.weights[0], heir.weights[0])


def test_weights_under_way_are_left_as_they_are() -> None:
    shard = make_shard()
    sent = shard.weights[0]
    shard.move_to([torch.empty(3), torch.empty(2)])
    shard.commit([give()])
    assert sent.tolist() == [0.0] * 3
    assert shard.weights[0].tolist() == [-1.0] * 3


def test_any_optimizer_of_torch_can_serve() -> None:
    shard = Shard([torch.ones(2)], TorchOptimizer(torch.optim.NAdam, lr=0.1), rate="full", num_workers=1)
    shard.commit([Contribution(0, 0, 0, 1.0, 0.1, (torch.ones(2),))])
    shard.move_to([torch.empty(2)])
    shard.commit([Contribution(0, 1, 1, 1.0, 0.1, (torch.ones(2),))])
    assert int(shard.state.shared.step) == 2
    assert (shard.weights[0] < 1).all()


@pytest.mark.parametrize(
    "tensors",
    [(torch.zeros(3),), (torch.zeros(3), torch.zeros(3)), (torch.zeros(3), torch.zeros(2, dtype=torch.float64))],
)
def test_tensors_of_another_shape_or_type_are_not_accepted(tensors: tuple[Tensor, ...]) -> None:
    assert not make_shard().accepts(tensors)
    assert make_shard().accepts((torch.zeros(3), None))
