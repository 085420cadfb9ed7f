"""Momentum of a script's optimizers under dgc, which ranks keep themselves: weight decay, steps that fail, several."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.dgc_momentum import use_masking
from tests.distributed.script.loops import data_of
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.saving.saving import load, save
from weft.distributed.script.weaving import momentum as module
from weft.distributed.script.weaving.weave import weave
from weft.errors import PlanError, TrainingError, UsageError

ALL = "data=2 compress=dgc(1,warmup=0)"
OPTIONS: list[dict[str, Any]] = [{}, {"nesterov": True}, {"maximize": True}, {"fused": True}, {"lr": torch.tensor(0.1)}]


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def training(
    scale: float = 0.0, path: Path | None = None, *, until: int = 20, closure: bool = False, **options: Any
) -> Callable[[], Any]:
    """A script of two groups with a decay each; its weights after 20 steps.

    Args:
        scale: of the loss; 0 leaves the decay alone.
        until: the step after which it saves and ends.
    """

    def script() -> list[float]:
        model = make_model()
        weights, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
        groups: Any = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.02}]
        own: Any = torch.optim.SGD(groups, **{"lr": 0.1, "momentum": 0.9, **options})
        model, own, _ = weave(model, own, None)
        x, y = (tensor.double() for tensor in data_of(16).tensors)
        done = load(path, model=model, optimizer=own)["done"] if path is not None and path.exists() else 0

        def backward() -> Any:
            own.zero_grad()
            loss = scale * (model(x) - y).square().mean()
            loss.backward()
            return loss

        while done < until:
            own.step(backward) if closure else (backward(), own.step())
            done += 1
        if path is not None and until < 20:
            save(path, model=model, optimizer=own, done=done)
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    return script


def plain(script: Callable[[], Any]) -> Any:
    return run_script(script, 2, "data=2")[0]


def norm_of(weights: list[float]) -> float:
    return float(torch.tensor(weights).norm())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ", ".join(options) or "plain")
@pytest.mark.parametrize("plan", [ALL, "shard=2 compress=dgc(1,warmup=0)"])
def test_weight_decay_has_its_momentum(plan: str, options: dict[str, Any]) -> None:
    # Regression: with the momentum of the optimizer taken away, decay was ten times too weak.
    script = training(**options)
    first, second = run_script(script, 2, plan)
    assert first == second
    assert first == pytest.approx(plain(script), rel=1e-12)


def test_decay_without_its_momentum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_next_velocities", lambda *_: {})
    found, *_ = run_script(training(), 2, ALL)
    assert norm_of(found) > 1.5 * norm_of(plain(training()))


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["plain", "nesterov"])
def test_all_that_is_sent_without_masking_is_dense_momentum(options: dict[str, Any], closure: bool) -> None:
    script = training(1.0, closure=closure, **options)
    with use_masking(False):
        found, *_ = run_script(script, 2, ALL)
    assert found == pytest.approx(plain(training(1.0, **options)), rel=1e-9)


@pytest.mark.parametrize("plan", ["data=2", "shard=2", "shard=2 shard_level=2"])
def test_a_checkpoint_has_the_velocity_of_the_decay(plan: str, tmp_path: Path) -> None:
    chosen = f"{plan} compress=dgc(0.1,warmup=2)"
    whole = run_script(training(1.0), 2, chosen)
    run_script(training(1.0, tmp_path / "saved", until=7), 2, chosen)
    assert run_script(training(1.0, tmp_path / "saved"), 2, chosen) == whole


def test_a_script_that_takes_up_dgc_goes_on_with_the_momentum_that_it_had(tmp_path: Path) -> None:
    run_script(training(1.0, tmp_path / "saved", until=7), 2, "data=2")
    with use_masking(False):
        found, *_ = run_script(training(1.0, tmp_path / "saved"), 2, ALL)
    assert found == pytest.approx(plain(training(1.0)), rel=1e-9)


def test_a_step_that_fails_gives_the_momentum_back() -> None:
    # Regression: it was 0 from then on, for the script and for the ranks.
    def script() -> float:
        model = make_model()
        model, own, _ = weave(model, torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=0.1), None)

        def closure() -> float:
            raise UsageError("no data")

        with pytest.raises(UsageError, match="no data"):
            own.step(closure)
        return float(own.param_groups[0]["momentum"])

    assert run_script(script, 2, ALL) == [0.9, 0.9]


def several(first: dict[str, Any], second: dict[str, Any], change: Callable[..., None] | None = None) -> Any:
    """Two models with an optimizer each; what changes comes after the first steps."""

    def script() -> list[Any]:
        models = [make_model(), make_model()]
        own = [
            torch.optim.SGD(model.parameters(), lr=0.1, **settings)
            for model, settings in zip(models, (first, second), strict=True)
        ]
        weave(models, own, None)
        for step in range(3):
            for model, optimizer in zip(models, own, strict=True):
                optimizer.zero_grad()
                model(data_of(8).tensors[0].double()).square().mean().backward()
                optimizer.step()
            if step == 0 and change is not None:
                change(*own)
        return [optimizer.param_groups[0]["momentum"] for optimizer in own]

    return script


DIFFERING = [
    ({"momentum": 0.9}, {"momentum": 0.5}),
    ({"momentum": 0.9}, {}),
    ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9}),
]


@pytest.mark.parametrize(("first", "second"), DIFFERING)
def test_optimizers_of_different_momentum_are_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    # Regression: the one that stepped last gave its momentum to the gradients of all.
    with pytest.raises((PlanError, TrainingError), match=r"keep one momentum .* give all groups of all optimizers"):
        run_script(several(first, second), 2, ALL)


def test_a_schedule_of_one_optimizer_alone_is_refused() -> None:
    def change(_first: Any, second: Any) -> None:
        second.param_groups[0]["momentum"] = 0.8

    with pytest.raises((PlanError, TrainingError), match=r"momentum: 0\.8, .* momentum: 0\.9, .* give all groups"):
        run_script(several({"momentum": 0.9}, {"momentum": 0.9}, change), 2, ALL)


def test_a_schedule_of_all_optimizers_is_followed() -> None:
    def change(*optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.param_groups[0]["momentum"] = 0.8

    assert run_script(several({"momentum": 0.9}, {"momentum": 0.9}, change), 2, ALL) == [[0.8, 0.8]] * 2
