"""Events of a woven loop: in the order in which a step happens, and none without observers."""

import torch
from torch import nn

from weft.distributed.script.data.batch_share import BatchShare
from weft.distributed.script.observation.events import GradientReady, ScriptEvent, UpdateBegan, Woven
from weft.distributed.script.weaving.observing import observe
from weft.distributed.script.weaving.weaving import Weaving
from weft.distributed.script.world.world import find_world
from weft.specs import parse_plan


def weaving_of(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> Weaving:
    return Weaving(find_world(), parse_plan(""), models, optimizers, BatchShare(1))


def loop(events: list[ScriptEvent], *, scheduled_first: bool) -> torch.optim.Optimizer:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if scheduled_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    observe(events.append, weaving_of([model], [optimizer]))
    if not scheduled_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return optimizer


def test_a_step_in_the_order_of_its_events() -> None:
    events: list[ScriptEvent] = []
    optimizer = loop(events, scheduled_first=False)
    names = [type(event).__name__ for event in events]
    passed = ["ForwardBegan", "ForwardEnded", *["GradientReady"] * 4, "BackwardEnded", "ExchangeEnded"]
    assert names == ["Woven", *[*passed, "UpdateBegan", "UpdateEnded"] * 2]
    assert {event.name for event in events if isinstance(event, GradientReady)} == set(_woven(events).parameters)
    assert [event.optimizer for event in events if isinstance(event, UpdateBegan)] == [optimizer] * 2


def test_a_scheduler_made_before_sees_its_steps() -> None:
    """Warnings are errors in tests, and torch warns where a scheduler finds that its optimizer has not stepped."""
    events: list[ScriptEvent] = []
    assert loop(events, scheduled_first=True).param_groups[0]["lr"] < 0.1
    assert sum(isinstance(event, UpdateBegan) for event in events) == 2


def test_parameters_of_several_models_are_told_apart() -> None:
    events: list[ScriptEvent] = []
    observe(events.append, weaving_of([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)], []))
    assert list(_woven(events).parameters) == ["0.weight", "1.weight"]


def test_gradients_come_before_they_are_added() -> None:
    events: list[ScriptEvent] = []
    model = nn.Linear(1, 1, bias=False)
    observe(events.append, weaving_of([model], []))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    assert [event.gradient.item() for event in events if isinstance(event, GradientReady)] == [1.0, 1.0]


def test_an_update_by_hand_ends_with_the_next_forward() -> None:
    events: list[ScriptEvent] = []
    model = nn.Linear(1, 1, bias=False)
    observe(events.append, weaving_of([model], []))
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 1))
    names = [type(event).__name__ for event in events if "Forward" in type(event).__name__ or "Up" in str(event)]
    forward = ["ForwardBegan", "ForwardEnded"]
    assert names == [*forward, "UpdateBegan", "UpdateEnded", *forward, "UpdateBegan", *forward]


def _woven(events: list[ScriptEvent]) -> Woven:
    assert isinstance(events[0], Woven)
    return events[0]
