"""Computation in virtual time: what is charged when, and what the mathematics does not notice."""

import pytest
import torch
from torch import Tensor, nn

from weft.distributed.group.clock import AbstractClock
from weft.errors import UsageError
from weft.graph import EagerExecutor
from weft.recipes import digits_mlp
from weft.simulation.computation import ChargingExecutor, ChargingOptimizer, ComputeModel, spread_evenly
from weft.simulation.timing import measure_computation
from weft.specs import Batch
from weft.training.build import build_splits
from weft.training.optimizers import OPTIMIZERS

BATCH = Batch((torch.ones(4, 3),), (torch.zeros(4, dtype=torch.int64),))


class CountingClock(AbstractClock):
    """A clock that only charges move."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def charge(self, seconds: float) -> None:
        self.time += seconds

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


def build_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def model_of(**ready: float) -> ComputeModel:
    names = {key.replace("_", "."): share for key, share in ready.items()}
    return ComputeModel(seconds_per_pass=6.0, seconds_per_sample=0.5, seconds_per_update=1.5, ready=names)


def test_time_passes_up_to_each_gradient_and_to_the_end_of_the_pass() -> None:
    clock, seen = CountingClock(), dict[str, float]()
    model = model_of(**{"1_bias": 0.25, "1_weight": 0.5, "0_weight": 0.75, "0_bias": 0.75})
    executor = ChargingExecutor(EagerExecutor(build_module(), nn.functional.cross_entropy), model, clock)
    executor(executor.initial_state(), BATCH, lambda name, _: seen.__setitem__(name, clock.time))
    assert seen == {"1.bias": 2.0, "1.weight": 4.0, "0.weight": 6.0, "0.bias": 6.0}
    assert clock.time == model.seconds(len(BATCH)) == 8.0


def test_the_gradients_are_those_of_the_executor_inside() -> None:
    found: list[dict[str, Tensor | None]] = [{}, {}]
    plain = EagerExecutor(build_module(), nn.functional.cross_entropy)
    charging = ChargingExecutor(EagerExecutor(build_module(), nn.functional.cross_entropy), model_of(), CountingClock())
    for gradients, executor in zip(found, (plain, charging), strict=True):
        outputs, _ = executor(executor.initial_state(), BATCH, gradients.__setitem__)
        gradients["loss"] = outputs.loss
    assert found[0].keys() == found[1].keys()
    assert all(
        torch.equal(a, b)
        for a, b in zip(found[0].values(), found[1].values(), strict=True)
        if a is not None and b is not None
    )


def test_inference_takes_the_time_of_a_forward_pass() -> None:
    clock = CountingClock()
    executor = ChargingExecutor(
        EagerExecutor(build_module(), nn.functional.cross_entropy), model_of(**{"1_bias": 0.25, "0_bias": 1.0}), clock
    )
    executor.infer(executor.initial_state(), BATCH)
    assert clock.time == 2.0
    assert executor.first_bad_tensor(executor.initial_state(), BATCH) is None


def test_an_update_takes_time_by_the_elements_that_it_updates() -> None:
    clock = CountingClock()
    optimizer = ChargingOptimizer(OPTIMIZERS["sgd"](lr=0.5), model_of(), clock)
    parameters = {"a": torch.ones(1), "b": torch.ones(2)}
    assert optimizer.prepare(parameters, optimizer.init(parameters)) is parameters
    optimizer.update({"a": torch.ones(1), "b": None}, parameters, optimizer.init(parameters), optimizer.lr)
    assert (parameters["a"].item(), clock.time) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seconds_per_pass": -1.0}, "less than no time"),
        ({"seconds_per_update": float("nan")}, "less than no time"),
        ({"ready": {"w": 0.0}}, "outside its pass"),
        ({"ready": {"w": 1.5}}, "outside its pass"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(options: dict[str, object], text: str) -> None:
    plain = {"seconds_per_pass": 1.0, "seconds_per_sample": 1.0, "seconds_per_update": 1.0, "ready": {}}
    with pytest.raises(UsageError, match=text):
        ComputeModel(**{**plain, **options})  # type: ignore[arg-type]


def test_given_seconds_are_spread_over_trained_parameters_only() -> None:
    module = build_module()
    module[0].requires_grad_(False)  # type: ignore[index]
    model = spread_evenly(dict(module.named_parameters()), 3.0)
    assert list(model.ready) == ["1.bias", "1.weight"]
    assert model.ready["1.weight"] == 1.0 and model.seconds(100) == 3.0


def test_rounding_lets_no_gradient_be_ready_after_its_pass() -> None:
    """1/3 + (1 - 1/3) * 27 / 27 is above 1 in float64: `fashion_cnn` could not be simulated with given seconds."""
    assert spread_evenly({"weight": torch.zeros(27)}, 3.0).ready == {"weight": 1.0}


@pytest.mark.parametrize("num_samples", [4, 1257])
def test_a_measured_model_has_every_gradient_in_the_order_of_backward(num_samples: int) -> None:
    recipe = digits_mlp()
    model = measure_computation(recipe, build_splits(recipe), num_samples)
    last, first = model.ready["7.weight"], model.ready["1.weight"]
    assert 0 < last < first <= 1
    assert model.seconds(num_samples) > 0 and model.seconds_per_update > 0
