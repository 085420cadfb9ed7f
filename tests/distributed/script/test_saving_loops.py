"""Training that is interrupted in the middle of an epoch, and goes on with as many ranks or others."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.virtual_script import run_script
from tests.processes.ranks import run_processes
from weft.distributed.script.saving.saving import load, save
from weft.distributed.script.weaving.weave import weave

EPOCHS, BATCHES = 3, 6


@pytest.fixture(autouse=True)
def random_is_left_alone() -> Iterator[None]:
    """A load moves the generators of the process, which the tests after it share."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def training(
    path: Path, *, until: int | None = None, dropout: float = 0.0, own: bool = False, is_between: bool = False
) -> Callable[[], dict[str, list[float]]]:
    """A script as people write them: it goes on from its checkpoint if there is one.

    Args:
        until: the batch after which it saves and ends.
        is_between: whether it does so at the end of that batch's epoch.
        own: whether the loader has a generator of its own.
    """

    def script() -> dict[str, list[float]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
        x = torch.randn(44, 6, generator=torch.Generator().manual_seed(2)).double()  # the last batch is a short one
        loader: Any = DataLoader(
            TensorDataset(x, x.sin().sum(1, keepdim=True)),
            8,
            shuffle=True,
            generator=torch.Generator().manual_seed(3) if own else None,
        )
        model, optimizer, loader = weave(model, optimizer, loader)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        start, done, losses = 0, 0, []
        if path.exists():
            values = load(path, **parts)
            start, done, losses = values["epoch"], values["done"], values["losses"]
        for epoch in range(start, EPOCHS):
            for a, b in loader:
                loss = nn.functional.mse_loss(model(a), b)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                done += 1
                losses.append(loss.item())
                if done == until and not is_between:
                    save(path, **parts, epoch=epoch, done=done, losses=losses)
                    return {}
            if done == until:
                save(path, **parts, epoch=epoch + 1, done=done, losses=losses)
                return {}
        assert done == len(losses) == EPOCHS * BATCHES and loader.state_dict()["batches"] == 0
        return {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}

    return script


def run(script: Callable[[], Any], size: int, plan: str | None = None) -> list[Any]:
    return run_script(script, size, plan) if size > 1 else [alone(script)]


def alone(script: Callable[[], Any]) -> Any:
    return run_script(script, 1)[0]


PLANS = ["data", "shard", "data consistency=local(4)", "data consistency=elastic(4)", "data topology=server"]


@pytest.mark.parametrize("until", [4, 6, 9])
@pytest.mark.parametrize(("size", "plan"), [(1, "data"), *((2, plan) for plan in PLANS)])
def test_as_many_ranks_go_on_to_the_same_bits(tmp_path: Path, size: int, plan: str, until: int) -> None:
    whole = run(training(tmp_path / "a", dropout=0.3), size, plan)
    run(training(tmp_path / "b", dropout=0.3, until=until), size, plan)
    assert run(training(tmp_path / "b", dropout=0.3), size, plan) == whole


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("own", [False, True])
def test_another_number_of_ranks_goes_on_to_rounding(tmp_path: Path, before: int, after: int, own: bool) -> None:
    whole = alone(training(tmp_path / "a", own=own))
    run(training(tmp_path / "b", own=own, until=8), before)
    for end in run(training(tmp_path / "b", own=own), after):
        for name, values in whole.items():
            assert end[name] == pytest.approx(values, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_between_epochs_a_rank_saves_its_own_though_it_holds_what_all_stand_for(tmp_path: Path, plan: str) -> None:
    whole = run(training(tmp_path / "a", dropout=0.3), 2, plan)
    run(training(tmp_path / "b", dropout=0.3, until=BATCHES, is_between=True), 2, plan)
    assert run(training(tmp_path / "b", dropout=0.3), 2, plan) == whole


def in_process(folder: str, until: int) -> None:
    training(Path(folder), until=until)()


@pytest.mark.slow
def test_processes_hand_over_to_one(tmp_path: Path) -> None:
    this = "tests.distributed.script.test_saving_loops:in_process"
    run_processes(this, 2, folder=str(tmp_path / "b"), until=8)
    whole, end = alone(training(tmp_path / "a")), alone(training(tmp_path / "b"))
    for name, values in whole.items():
        assert end[name] == pytest.approx(values, rel=1e-10, abs=1e-12)


def test_a_chain_of_interruptions_with_every_plan_gives_one_processs_result(tmp_path: Path) -> None:
    whole = alone(training(tmp_path / "a"))
    for until, size, plan in ((3, 2, "data"), (5, 3, "shard"), (8, 2, "data topology=server"), (13, 1, "data")):
        run(training(tmp_path / "b", until=until), size, plan)
    (end,) = run(training(tmp_path / "b"), 1)
    for name, values in whole.items():
        assert end[name] == pytest.approx(values, rel=1e-10, abs=1e-12)
