"""Meetings of ranks: what differs between them is an error on all of them, with the lines of the script."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.virtual_plan import FREE
from weft.distributed.group import AbstractGroup
from weft.distributed.script.weaving.model_facts import describe_woven
from weft.distributed.script.world.world import World, use_world
from weft.distributed.virtual import run_virtual
from weft.errors import OutOfStepError
from weft.simulation.place import VirtualPlace


def run_on_ranks(script: Callable[[World], Any], size: int = 3) -> list[Any]:
    shared: dict[str, Any] = {}

    def program(group: AbstractGroup) -> Any:
        world = World(VirtualPlace(group, (), FREE, shared))
        with use_world(world):
            return script(world)

    return list(run_virtual(program, size).results)


def finding(script: Callable[[World], None], size: int = 3) -> list[str]:
    """The lines of the error that all ranks got."""

    def told(world: World) -> str:
        with pytest.raises(OutOfStepError) as caught:
            script(world)
        return str(caught.value)

    (text,) = set(run_on_ranks(told, size))  # all ranks tell the same
    return str(text).splitlines()


def test_ranks_in_one_call_meet() -> None:
    def script(world: World) -> float:
        total = torch.tensor(float(world.rank))
        for _ in range(2):
            with world.meeting("weft.sum", {"value": "float32 ()"}):
                world.group.all_reduce(total)
        return total.item()

    assert run_on_ranks(script) == [9.0] * 3


def test_different_calls() -> None:
    def script(world: World) -> None:
        if world.rank == 2:
            with world.meeting("weft.gather"):
                raise AssertionError("it must not come to this")
        with world.meeting("weft.mean"):
            raise AssertionError("it must not come to this")

    lines = finding(script)
    assert lines[0] == "ranks are out of step: rank 0 is in weft.mean, rank 2 in weft.gather"
    assert lines[1].startswith("  ranks 0-1 in weft.mean at ") and "test_in_step.py" in lines[1]
    assert lines[1].endswith('in script: with world.meeting("weft.mean"):')
    assert lines[2].endswith('in script: with world.meeting("weft.gather"):')


def test_the_same_call_at_another_line_is_another_call_only_where_that_matters() -> None:
    def script(world: World, *, same_line: bool) -> None:
        if world.rank == 0:
            with world.meeting("weft.mean", same_line=same_line):
                return
        with world.meeting("weft.mean", same_line=same_line):
            return

    assert "called at two places" in finding(lambda world: script(world, same_line=True))[0]
    run_on_ranks(lambda world: script(world, same_line=False))


def test_facts_that_differ_are_named_with_their_values() -> None:
    def script(world: World) -> None:
        with world.meeting("epoch", {"samples": 100, "batches": 10 - world.rank // 2}, same_line=False):
            pass

    assert finding(script)[0] == "ranks are out of step: batches is 10 on rank 0, 9 on rank 2"


def test_one_rank_and_servers_meet_nobody() -> None:
    def script(world: World) -> int:
        with world.meeting("weft.mean", {"rank": world.rank}), world.waiting("backward", None):
            return world.in_step.whereabouts.number

    assert run_on_ranks(script, 1) == [0]


# ---- different models


def make(change: str) -> dict[str, str]:
    """The facts of a small model and its optimizer, changed in one respect."""
    wide = nn.Linear(4, 3 if change == "shape" else 2)
    layers: list[nn.Module] = [wide, nn.BatchNorm1d(2), nn.Linear(2, 1, bias=change != "parameter missing")]
    model = nn.Sequential(*layers).to(torch.float64 if change == "dtype" else torch.float32)
    model[2].weight.requires_grad_(change != "frozen")
    parameters = list(model.parameters())
    if change == "order in the optimizer":
        parameters.reverse()
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}] if change == "groups" else parameters
    lr = 0.2 if change == "learning rate" else 0.1
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=lr)
    if change == "optimizer":
        optimizer = torch.optim.Adam(groups, lr=lr)
    return describe_woven([model], [optimizer], plan="data=2" if change != "plan" else "shard=2")


CHANGES = {
    "shape": "parameter 0.weight is float32 (2, 4) on rank 0, float32 (3, 4) on rank 1",
    "dtype": "parameter 0.weight is float32 (2, 4) on rank 0, float64 (2, 4) on rank 1",
    "frozen": "parameter 2.weight is float32 (1, 2) on rank 0, float32 (1, 2), frozen on rank 1",
    "parameter missing": "parameter 2.bias (float32 (1,)) on rank 0, buffer 1.running_mean (float32 (2",
    "optimizer": "optimizer is SGD on rank 0, Adam on rank 1",
    "groups": "group 0 of the optimizer, parameters is 0.weight, 0.bias, 1.weight",
    "order in the optimizer": "group 0 of the optimizer, parameters is 0.weight, 0.bias",
    "learning rate": "group 0 of the optimizer, settings is dampening=0",
    "plan": "plan is data=2 on rank 0, shard=2 on rank 1",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_difference_between_two_models_is_named(change: str) -> None:
    def script(world: World) -> None:
        with world.meeting("weft.weave", make(change if world.rank else "")):
            pass

    assert finding(script, 2)[0].startswith(f"ranks are out of step: {CHANGES[change]}")


def test_the_same_model_made_twice_has_the_same_facts() -> None:
    assert make("") == make("")
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())]
    facts = describe_woven([model, nn.Linear(1, 1)], optimizers)
    assert "parameter 1.weight" in facts and facts["optimizer 1"] == "Adam"
