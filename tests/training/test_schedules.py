from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RecipeError
from weft.training.component import Component, build
from weft.training.schedules import SCHEDULES, Schedule

EPOCH = 50
BUDGET = 10 * EPOCH


def make(name: str, **options: Any) -> Schedule:
    return build(Component(name, **options), SCHEDULES, "schedule", BUDGET, EPOCH)


# For each schedule, options that are good for ten epochs.
OPTIONS: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"final": 0.1},
    "exponential": {"gamma": 0.8},
    "step": {"gamma": 0.3, "milestones": (4.0, 7.5)},
}


def test_every_schedule_is_tried() -> None:
    assert OPTIONS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, {0: 1.0, 499: 1.0}),
        ("step", {"milestones": (4.0,)}, {0: 1.0, 199: 1.0, 200: 0.1, 499: 0.1}),
        ("step", {"milestones": (7.5, 5)}, {249: 1.0, 250: 0.1, 374: 0.1, 375: 0.01}),
        ("step", {"every": 2.0, "gamma": 0.5}, {0: 1.0, 99: 1.0, 100: 0.5, 200: 0.25, 499: 0.0625}),
        ("step", {"every": 0.5, "gamma": 0.5}, {24: 1.0, 25: 0.5, 50: 0.25}),
        ("exponential", {"gamma": 0.5}, {0: 1.0, 50: 0.5, 75: 0.5**1.5, 100: 0.25}),
        ("cosine", {}, {0: 1.0, 125: 0.8535533905932737, 250: 0.5, 500: 0.0, 531: 0.0}),
        ("cosine", {"final": 0.2}, {0: 1.0, 250: 0.6, 500: 0.2}),
        ("constant", {"warmup_epochs": 2.0}, {0: 0.1, 50: 0.55, 99: 0.991, 100: 1.0}),
        ("cosine", {"warmup_epochs": 2.0}, {0: 0.1, 100: 1.0, 300: 0.5, 500: 0.0}),
        ("exponential", {"warmup_epochs": 2.0, "gamma": 0.5}, {100: 1.0, 150: 0.5}),
        ("step", {"warmup_epochs": 2.0, "warmup_from": 0.5, "milestones": (4.0,)}, {0: 0.5, 100: 1.0, 200: 0.1}),
    ],
)
def test_values_at_the_edges(name: str, options: dict[str, Any], expected: dict[int, float]) -> None:
    schedule = make(name, **options)
    assert {samples: schedule(samples) for samples in expected} == pytest.approx(expected)


def test_milestone_at_the_start_counts() -> None:
    # Deep500's EpochHPSchedule never applied what was asked of epoch 0.
    assert make("step", milestones=(0.0,))(0) == 0.1


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("exponential", {"gamma": 0.7}, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7)),
        ("cosine", {}, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)),
        ("step", {"milestones": (3.0, 6.0)}, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 6])),
        ("step", {"every": 3.0}, lambda o: torch.optim.lr_scheduler.StepLR(o, 3)),
    ],
)
def test_at_whole_epochs_it_is_what_torch_has(
    name: str, options: dict[str, Any], reference: Callable[[torch.optim.Optimizer], Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, schedule = reference(optimizer), make(name, **options)
    for epoch in range(10):
        assert schedule(epoch * EPOCH) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        scheduler.step()


@given(
    name=st.sampled_from(sorted(OPTIONS)),
    warmup_epochs=st.floats(0, 3.9),
    warmup_from=st.floats(0.01, 1.0),
    samples=st.integers(0, BUDGET - 1),
)
def test_a_schedule_is_a_positive_factor_that_climbs_and_then_falls(
    name: str, warmup_epochs: float, warmup_from: float, samples: int
) -> None:
    schedule = make(name, warmup_epochs=warmup_epochs, warmup_from=warmup_from, **OPTIONS[name])
    now, after = schedule(samples), schedule(samples + 1)
    assert 0 < now <= 1
    end = round(warmup_epochs * EPOCH)
    assert after >= now - 1e-12 if samples < end else after <= now + 1e-12


@given(name=st.sampled_from(sorted(OPTIONS)), warmup_epochs=st.floats(0.02, 3.9), warmup_from=st.floats(0.01, 1.0))
def test_warm_up_meets_its_schedule_at_one(name: str, warmup_epochs: float, warmup_from: float) -> None:
    schedule = make(name, warmup_epochs=warmup_epochs, warmup_from=warmup_from, **OPTIONS[name])
    end = round(warmup_epochs * EPOCH)
    assert schedule(0) == pytest.approx(warmup_from)
    assert schedule(end) == pytest.approx(1.0)
    assert schedule(end) - schedule(end - 1) == pytest.approx((1 - warmup_from) / end)


@given(name=st.sampled_from(sorted(OPTIONS)), size=st.sampled_from([2, 50, 60_000]), quarters=st.integers(0, 39))
def test_curve_over_the_epochs_is_the_same_for_every_size_of_data(name: str, size: int, quarters: int) -> None:
    component = Component(name, warmup_epochs=2.0, **OPTIONS[name])
    small = build(component, SCHEDULES, "schedule", 40, 4)
    large = build(component, SCHEDULES, "schedule", 40 * size, 4 * size)
    assert large(quarters * size) == pytest.approx(small(quarters))


@pytest.mark.parametrize(
    ("name", "options", "fact"),
    [
        ("step", {"milestones": (4.0, 10.0)}, "milestone is never reached"),
        ("step", {"milestones": (82,)}, "milestone is never reached"),
        ("step", {"every": 10.0}, "milestone is never reached"),
        ("step", {"milestones": (-1.0,)}, "milestone is before"),
        ("step", {"milestones": (1.0,), "warmup_epochs": 2.0}, "milestone is before the end of the warm-up"),
        ("step", {"every": 1.0, "warmup_epochs": 2.0}, "milestone is before the end of the warm-up"),
        ("step", {}, "needs milestones or every"),
        ("step", {"milestones": (1.0,), "every": 1.0}, "not both"),
        ("step", {"every": 0.0}, "drop at every sample"),
        ("step", {"milestones": (1.0,), "gamma": 0.0}, "gamma is not a decay"),
        ("exponential", {"gamma": 1.1}, "gamma is not a decay"),
        ("cosine", {"final": -0.1}, "final is not a factor"),
        ("constant", {"warmup_epochs": 10.0}, "warm-up does not end"),
        ("constant", {"warmup_epochs": -1.0}, "warm-up does not end"),
        ("constant", {"warmup_from": 0.0}, "warmup_from is not a factor"),
        ("cosin", {}, "did you mean 'cosine'"),
    ],
)
def test_impossible_schedules_are_refused(name: str, options: dict[str, Any], fact: str) -> None:
    with pytest.raises(RecipeError, match=fact):
        make(name, **options)
