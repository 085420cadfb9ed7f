"""Scripts whose ranks send compressed gradients: the optimizer's own momentum, checkpoints, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.virtual_script import run_script
from weft.distributed.placement import DataParallel
from weft.distributed.script.saving.saving import load, save
from weft.distributed.script.weaving.weave import weave
from weft.errors import PlanError, TrainingError

EPOCHS, BATCHES = 3, 4


def training(
    path: Path | None = None, *, until: int | None = None, optimizer: str = "SGD", decays: bool = False
) -> Callable[[], Any]:
    """A script that goes on from its checkpoint if there is one; its weights, and the momentum after every step.

    Args:
        until: the step after which it saves and ends.
        decays: whether the momentum is made smaller from step to step.
    """

    def script() -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        own: Any = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **options)
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
        loader: Any = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 8)
        model, own, loader = weave(model, own, loader)
        parts, start, done, momenta = {"model": model, "optimizer": own, "loader": loader}, 0, 0, []
        if path is not None and path.exists():
            values = load(path, **parts)
            start, done = values["epoch"], values["done"]
        for epoch in range(start, EPOCHS):
            for a, b in loader:
                own.zero_grad()
                nn.functional.mse_loss(model(a), b).backward()
                own.step()
                momenta.append(own.param_groups[0].get("momentum"))
                if decays:
                    own.param_groups[0]["momentum"] *= 0.9
                done += 1
                if done == until and path is not None:
                    save(path, **parts, epoch=epoch, done=done)
                    return None
        return [p.tolist() for p in model.parameters()], momenta

    return script


PLANS = [
    "data=2 compress=topk(0.05)",
    "data=2 compress=dgc(0.05,warmup=2)",
    "data=2 compress=powersgd(1)",
    "data=2 consistency=local(2) compress=topk(0.05)",
    "data=2 consistency=gossip(ring) compress=sign",
    "data=2 topology=server compress=onebit",
    "shard=2 compress=topk(0.05)",
    "shard=2 shard_level=2 compress=topk(0.05)",
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_script_that_is_cut_goes_on_to_the_same_bits(plan: str, tmp_path: Path) -> None:
    whole = run_script(training(), 2, plan)
    run_script(training(tmp_path / "saved", until=6), 2, plan)
    again = run_script(training(tmp_path / "saved"), 2, plan)
    assert [one[0] for one in again] == [one[0] for one in whole]


def test_residuals_that_a_script_does_not_save_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_script(training(), 2, PLANS[0])
    monkeypatch.setattr(DataParallel, "memory", lambda self: {})
    run_script(training(tmp_path / "saved", until=6), 2, PLANS[0])
    again = run_script(training(tmp_path / "saved"), 2, PLANS[0])
    assert [one[0] for one in again] != [one[0] for one in whole]


def test_the_optimizers_own_momentum_is_back_after_every_step() -> None:
    for _, momenta in run_script(training(), 2, "data=2 compress=dgc(0.05)"):
        assert momenta == [0.9] * (EPOCHS * BATCHES)


def test_a_momentum_that_changes_is_followed() -> None:
    plan = "data=2 compress=dgc(0.2,warmup=0)"
    (changed, momenta), *_ = run_script(training(decays=True), 2, plan)
    (still, _), *_ = run_script(training(), 2, plan)
    assert momenta == pytest.approx([0.9 * 0.9**step for step in range(EPOCHS * BATCHES)])
    assert changed != still


def test_all_that_is_selected_is_the_gradient() -> None:
    plain, selected = (run_script(training(), 2, f"data=2 compress={codec}") for codec in ("none", "topk(1)"))
    assert plain == selected


def test_an_optimizer_whose_momentum_cannot_be_taken_is_refused_with_the_cure() -> None:
    with pytest.raises((PlanError, TrainingError), match=r"optimizer: Adam\); use torch.optim.SGD, or compress=topk"):
        run_script(training(optimizer="Adam"), 2, "data=2 compress=dgc")
