"""A script's optimizers on pieces of their parameters, beside the optimizers themselves."""

import pytest
import torch
from torch import Tensor, nn

from weft.distributed.placement.cut import cut_evenly
from weft.distributed.script.weaving.torch_updates import ShardUpdates, changes_of, settings_of_groups, write_slots
from weft.training.optimizers.torch_optimizer import clone_over


def parameters() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"w": nn.Parameter(torch.randn(10, 20)), "b": nn.Parameter(torch.randn(20))}


def shards_of(optimizer: torch.optim.Optimizer, own: dict[str, Tensor], num_shards: int) -> list[ShardUpdates]:
    return [ShardUpdates([optimizer], [own], pieces) for pieces in cut_evenly(own, num_shards)]


def step_shards(
    shards: list[ShardUpdates], own: dict[str, Tensor], gradients: dict[str, Tensor], lr: float, settings: str | None
) -> dict[str, Tensor]:
    """Two updates with the same gradients; the weights put together."""
    after = {name: parameter.detach().clone() for name, parameter in own.items()}
    for shard, pieces in zip(shards, cut_evenly(own, len(shards)), strict=True):
        views = {str(i): piece.of(after[piece.name]) for i, piece in enumerate(pieces)}
        given: dict[str, Tensor | None] = {str(i): piece.of(gradients[piece.name]) for i, piece in enumerate(pieces)}
        state = shard.init(views)
        for _ in range(2):
            shard.tune(settings)
            state = shard.update(given, views, state, lr)
    return after


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_shards_update_as_the_optimizer_does_and_by_a_part_of_its_rate(kind: type, num_shards: int) -> None:
    """The learning rate that a policy gives (a share of the batch) scales those of all groups."""
    own = parameters()
    groups = [{"params": [own["w"]], "lr": 0.2}, {"params": [own["b"]], "weight_decay": 0.3}]
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.1)
    gradients = {name: torch.randn_like(parameter) for name, parameter in own.items()}
    shards = shards_of(optimizer, own, num_shards)
    found = step_shards(shards, own, gradients, 0.5, None)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for name, parameter in own.items():
        parameter.grad = gradients[name].clone()
    optimizer.step()
    optimizer.step()
    for name, parameter in own.items():
        assert torch.equal(found[name], parameter), name


def test_settings_hold_for_one_update_and_go_back() -> None:
    """Of the push of a rank whose schedule is further on, and of the one after it, which has changed nothing."""
    own = parameters()
    optimizer = torch.optim.SGD(own.values(), lr=0.1)
    before = settings_of_groups([optimizer])
    (shard,) = shards_of(optimizer, own, 1)
    optimizer.param_groups[0]["lr"] = 0.4
    gradients = {name: torch.ones_like(parameter) for name, parameter in own.items()}
    for settings, lr in ((changes_of(settings_of_groups([optimizer]), before), 0.4), (None, 0.1)):
        found = step_shards([shard], own, gradients, 1.0, settings)
        assert torch.allclose(found["w"], own["w"] - 2 * lr)


def test_a_state_that_was_there_before_weave_is_cut() -> None:
    own = parameters()
    optimizer = torch.optim.SGD(own.values(), lr=0.1, momentum=0.9)
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gradients = {name: torch.zeros_like(parameter) for name, parameter in own.items()}
    found = step_shards(shards_of(optimizer, own, 2), own, gradients, 1.0, None)
    for name, parameter in own.items():
        assert torch.allclose(found[name], parameter - 0.1 * (0.9 + 0.81)), name


def test_slots_that_come_back_keep_their_kinds_and_their_memory() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    moment = torch.zeros(2)
    optimizer.state[weight] = {"count": 3, "moment": moment}
    slots = {"count": torch.tensor(5), "moment": torch.ones(2), "new": torch.tensor(0.5)}
    write_slots(optimizer, weight, slots)
    found = optimizer.state[weight]
    assert type(found["count"]) is int and found["count"] == 5
    assert found["moment"] is moment and moment.tolist() == [1.0, 1.0]
    assert torch.equal(found["new"], slots["new"]) and found["new"] is not slots["new"]


def test_a_clone_has_the_class_and_leaves_behind_what_hangs_on_the_instance() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            self.extra = 3

    weight = nn.Parameter(torch.ones(1))
    optimizer = Odd([weight], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it replaces the step of the instance
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the script's own"))
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    clone = clone_over(optimizer, [{**optimizer.param_groups[0], "params": [other]}])
    clone.step()
    assert isinstance(clone, Odd) and clone.extra == 3
    assert (other.item(), weight.item()) == (0.5, 1.0)
