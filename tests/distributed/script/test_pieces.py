"""Scripts whose models lie in pieces (shard_level 2 and 3): the loop is as it is, and ends where one process does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import weft
from tests.distributed.script.loops import apart, data_of
from tests.distributed.script.virtual_script import run_script
from weft.distributed.placement import sharded_model
from weft.distributed.script.weaving.weave import weave

LEVELS = ["shard=2 shard_level=1", "shard=2 shard_level=2", "shard=2 shard_level=3"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of the small models below is a block."""
    defaults = sharded_model.ShardedModel.__init__.__defaults__
    assert defaults is not None
    monkeypatch.setattr(sharded_model.ShardedModel.__init__, "__defaults__", (*defaults[:-1], 1))


class Residual(nn.Module):
    """Layers that share a weight, compute one of them anew in backward, and have one that is not trained."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)
        self.last = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 1))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)).tanh()
        found: Tensor = self.last(x)
        return found


def train(plan: str, step: Callable[..., None], recompute: bool = False) -> list[float]:
    model = Residual(recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = weave(model, optimizer, DataLoader(data_of(22), 8), plan=plan)
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, x, y)
    state = weft.state_dict(model)
    return torch.cat([state[name].reshape(-1) for name in sorted(state)]).tolist()


def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()  # between forward and backward
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def twice(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """Two forwards, then two backward calls that add up, and a forward without gradients."""
    losses = [nn.functional.mse_loss(model(x * factor), y) for factor in (1.0, 0.5)]
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        assert model(x).isfinite().all()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("plan", LEVELS)
@pytest.mark.parametrize("step", [plain, clipped, twice])
def test_the_loop_as_it_is_ends_where_one_process_does(plan: str, step: Callable[..., None]) -> None:
    expected = train("data=1", step)
    for found in run_script(lambda: train(plan, step), 2):
        assert apart(found, expected) < 1e-5


@pytest.mark.parametrize("plan", [*LEVELS[1:], "data=2 shard=2 shard_level=3"])
def test_layers_that_are_computed_anew_in_backward(plan: str) -> None:
    expected = train("data=1", plain)
    for found in run_script(lambda: train(plan, plain, recompute=True), 4 if "data" in plan else 2):
        assert apart(found, expected) < 1e-5


@pytest.mark.parametrize("plan", LEVELS)
def test_ranks_evaluate_unequal_numbers_of_batches(plan: str) -> None:
    """Each at its own pace, and then train on."""

    def script() -> list[float]:
        model = Residual()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer, _ = weave(model, optimizer, plan=plan)
        x, y = data_of(8).tensors
        found = []
        for _ in range(2):
            with torch.no_grad():
                losses = [((model(x) - y) ** 2).sum() for x, y in weft.evaluation(DataLoader(data_of(20), 8))]
            found.append(weft.sum(torch.stack(losses).sum()).item())
            plain(model, optimizer, x, y)
        return found

    (expected,) = run_script(script, 1, "data=1")
    for found in run_script(script, 2, plan):
        assert apart(found, expected) < 1e-5


def test_gradients_and_parameters_are_pieces_after_backward() -> None:
    def script() -> tuple[int, int, int]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        model, optimizer, _ = weave(model, optimizer, plan="shard=2 shard_level=3")
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        held = [p.numel() for p in model.parameters()]
        grads = [p.grad.numel() for p in model.parameters() if p.grad is not None]
        slots = [slot["momentum_buffer"].numel() for slot in optimizer.state.values()]
        return sum(held), sum(grads), sum(slots)

    whole = 2 * (64 * 64 + 64)
    found = run_script(script, 2)
    assert [sum(numbers) for numbers in zip(*found, strict=True)] == [whole] * 3
    assert all(abs(number - whole / 2) <= 128 for numbers in found for number in numbers)


@pytest.mark.parametrize("plan", LEVELS)
def test_a_script_saves_under_one_level_and_goes_on_under_another(plan: str, tmp_path: Path) -> None:
    def script(plan: str, source: Path | None, target: Path | None) -> list[float]:
        model = Residual()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, _ = weave(model, optimizer, plan=plan)
        if source is not None:
            weft.load(source, model=model, optimizer=optimizer)
        x, y = data_of(8).tensors
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if target is not None:
            weft.save(target, model=model, optimizer=optimizer)
        state = weft.state_dict(model)
        return torch.cat([state[name].reshape(-1) for name in sorted(state)]).tolist()

    run_script(lambda: script(plan, None, tmp_path / "a"), 2)
    expected = script("data=1", tmp_path / "a", None)
    for other in LEVELS:
        for found in run_script(partial(script, other, tmp_path / "a", None), 2):
            assert apart(found, expected) < 1e-5, other


def test_state_of_a_script_goes_to_disk() -> None:
    def script() -> bool:
        from weft.training.optimizers.offloading import is_on_disk

        model = nn.Linear(200, 200)
        optimizer = torch.optim.Adam(model.parameters())
        model, optimizer, _ = weave(model, optimizer, plan="shard=2 shard_level=3(offload=disk)")
        for _ in range(2):
            model(torch.ones(2, 200)).sum().backward()
            optimizer.step()
        return any(is_on_disk(s) for own in optimizer.state.values() for s in own.values() if isinstance(s, Tensor))

    assert all(run_script(script, 2))
