"""Scripts whose model is cut into stages: the loop's forward and backward are one call, the rest stays as it is."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.distributed.script.virtual_script import run_script
from weft.errors import PlanError, UsageError

INPUTS = torch.randn(26, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 3, (26,), generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def train(plan: str, *, epochs: int = 2, clip: float | None = 0.5, accumulate: int = 1) -> dict[str, Any]:
    """A loop as people write it, but for one call."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)
    model, optimizer, loader = weft.weave(model, optimizer, loader, plan=plan)
    losses, norms = [], []
    for _ in range(epochs):
        for step, (x, y) in enumerate(loader):
            losses.append(weft.forward_backward(model, functional.cross_entropy, x, y).item())
            if step % accumulate == accumulate - 1:
                if clip is not None:
                    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    with torch.no_grad():
        outputs = model(INPUTS)
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "losses": losses,
        "norms": norms,
        "out": outputs,
    }


def check_same(found: dict[str, Any], expected: dict[str, Any], *, has_losses: bool = True) -> None:
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["out"], expected["out"], rtol=1e-5, atol=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    if has_losses:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.parametrize("schedule", ["gpipe(4)", "1f1b(4)", "zero_bubble(4)"])
def test_stages_train_the_model_of_one_process(schedule: str) -> None:
    expected = train("data")
    for found in run_script(partial(train, f"pipeline=3 schedule={schedule}"), 3, f"pipeline=3 schedule={schedule}"):
        check_same(found, expected)


def test_stages_keep_the_momentum_of_their_gradients() -> None:
    # Regression: the optimizer kept it too, after the sum. Where all is sent and masked, nothing is left of momentum.
    def descend(momentum: float, plan: str) -> dict[str, Tensor]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        loader: Any = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)
        model, optimizer, loader = weft.weave(model, optimizer, loader, plan=plan)
        for x, y in loader:
            weft.forward_backward(model, functional.cross_entropy, x, y)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["momentum"] == momentum
        return {name: value.clone() for name, value in model.state_dict().items()}

    expected, plan = descend(0.0, "data"), "data=2 pipeline=2 schedule=1f1b(2) compress=dgc(1,warmup=0)"
    for found in run_script(partial(descend, 0.9, plan), 4, plan):
        torch.testing.assert_close(found, expected)


def test_replicas_of_stages_share_each_batch() -> None:
    expected, plan = train("data"), "data=2 pipeline=2 schedule=1f1b(2)"
    for found in run_script(partial(train, plan), 4, plan):
        check_same(found, expected, has_losses=False)  # each replica tells the loss of its share


def test_a_script_is_cut_as_its_plan_says() -> None:
    """Rank 0 decides for all, though replicas look at batches of their own."""
    expected, plan = train("data"), "data=2 pipeline=2 schedule=1f1b(2) cut=time(stages=measured)"
    for found in run_script(partial(train, plan), 4, plan):
        check_same(found, expected, has_losses=False)
    plan = "pipeline=2 schedule=1f1b(2) cut=flops(memory=1e-7)"
    with pytest.raises(PlanError, match="no cut fits the memory of a stage"):
        run_script(partial(train, plan), 2, plan)


def test_gradients_of_several_batches_are_added_up() -> None:
    expected, plan = train("data", clip=None, accumulate=2), "pipeline=2 schedule=gpipe(2)"
    for found in run_script(partial(train, plan, clip=None, accumulate=2), 2, plan):
        check_same(found, expected)


def on_stages(
    work: Callable[[nn.Module, torch.optim.Optimizer], Any], plan: str = "pipeline=2", size: int = 2
) -> list[Any]:
    def script() -> Any:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters())
        weft.weave(model, optimizer, None, plan=plan)
        return work(model, optimizer)

    return run_script(script, size, plan)


def test_layers_of_other_stages_take_no_memory_and_their_state_none() -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        weft.forward_backward(model, functional.cross_entropy, INPUTS, TARGETS)
        optimizer.step()
        slots = [state["exp_avg"].numel() for state in optimizer.state.values()]
        return sum(parameter.numel() for parameter in model.parameters()), sum(slots)

    found = on_stages(work)
    whole = sum(parameter.numel() for parameter in make_model().parameters())
    assert sum(held for held, _ in found) == sum(slots for _, slots in found) == whole
    assert all(0 < held < whole for held, _ in found)


def test_forward_gives_the_output_on_every_rank_and_the_whole_model_comes_with_the_consensus() -> None:
    def work(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor, Tensor]:
        weft.forward_backward(model, functional.cross_entropy, INPUTS, TARGETS)
        optimizer.step()
        first = weft.forward(model, INPUTS)
        with weft.consensus(), torch.no_grad():
            second = model(INPUTS)
        return first, second, weft.forward(model, INPUTS)

    for first, second, third in on_stages(work):
        torch.testing.assert_close(first, second)
        assert torch.equal(first, third)


def test_a_model_that_is_in_stages_says_how_to_call_it() -> None:
    def work(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        weft.forward_backward(model, functional.cross_entropy, INPUTS, TARGETS)
        model(INPUTS)

    with pytest.raises(UsageError, match="layers of other stages are not on this rank"):
        on_stages(work)


@pytest.mark.parametrize(
    ("plan", "size", "why"),
    [
        ("pipeline=2 schedule=pipedream", 2, "update by themselves"),
        ("pipeline=2 tensor=2", 4, "replicated on data alone"),
    ],
)
def test_plans_that_a_script_cannot_carry_out_are_refused(plan: str, size: int, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        on_stages(lambda *_: None, plan, size)


def test_one_process_is_plain_forward_and_backward() -> None:
    model, other = make_model(), make_model()
    found = weft.forward_backward(model, functional.cross_entropy, (INPUTS,), (TARGETS,))
    loss = functional.cross_entropy(other(INPUTS), TARGETS)
    loss.backward()
    assert torch.equal(found, loss.detach()) and not found.requires_grad
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    assert torch.equal(weft.forward(model, INPUTS), other(INPUTS))


def train_and_save(plan: str, path: Path, *, begins: int = 0, ends: int = 2) -> dict[str, Tensor]:
    model = make_model()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8)
    model, optimizer, loader = weft.weave(model, optimizer, loader, plan=plan)
    if begins:
        assert weft.load(path, model=model, optimizer=optimizer)["epoch"] == begins
    for epoch in range(begins, ends):
        for x, y in loader:
            weft.forward_backward(model, functional.cross_entropy, x, y)
            optimizer.step()
            optimizer.zero_grad()
        weft.save(path, model=model, optimizer=optimizer, epoch=epoch + 1)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_a_script_goes_on_from_a_checkpoint_on_stages_to_the_same_bits_and_in_one_process(tmp_path: Path) -> None:
    plan = "pipeline=2 schedule=gpipe(2)"
    whole = run_script(partial(train_and_save, plan, tmp_path / "whole"), 2, plan)[0]
    run_script(partial(train_and_save, plan, tmp_path / "cut", ends=1), 2, plan)
    alone = train_and_save("data", copy_of(tmp_path / "cut"), begins=1)
    for found in run_script(partial(train_and_save, plan, tmp_path / "cut", begins=1), 2, plan):
        assert all(torch.equal(found[name], whole[name]) for name in whole)
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)


def copy_of(folder: Path) -> Path:
    return Path(shutil.copytree(folder, folder.with_name("copy")))
