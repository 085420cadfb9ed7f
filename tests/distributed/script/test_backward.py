"""How a backward counts: summed losses, no_sync, batch norm over all ranks, random numbers of each rank."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.script.loops import apart, data_of, make_model, train
from tests.distributed.script.virtual_script import run_script
from weft.distributed.script.calls.over_ranks import mean
from weft.distributed.script.weaving.blocks import no_sync
from weft.distributed.script.weaving.incoming import Loss
from weft.distributed.script.weaving.weave import weave
from weft.distributed.script.world.world import find_world
from weft.errors import OutOfStepError, PlanError, TrainingError, UsageError


def sum_of_squares(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().sum()


# ---- sums


@pytest.mark.parametrize("plan", ["data", "shard", "data topology=server(2)", "data compress=bf16"])
@pytest.mark.parametrize(("num_samples", "accumulate"), [(22, 1), (22, 3), (17, 2)])
def test_a_summed_loss_gives_one_processs_result(plan: str, num_samples: int, accumulate: int) -> None:
    """Ragged shares, shares of nothing, and gradients that were there before, which are not scaled once more."""
    script = partial(train, num_samples, accumulate=accumulate, loss_of=sum_of_squares, loss="sum", optimizer=sgd)
    found, alone = run_script(script, 3, plan), script()
    assert found[0] == found[1] == found[2]
    assert apart(found[0], alone) < (2e-2 if "bf16" in plan else 1e-5)
    if plan == "data" and accumulate == 1:  # as a mean it would be a third
        wrong = partial(train, num_samples, accumulate=accumulate, loss_of=sum_of_squares, optimizer=sgd)
        assert apart(run_script(wrong, 3, plan)[0], alone) > 1e-2


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)


def test_a_summed_loss_of_a_share_stands_for_that_of_the_batch() -> None:
    """A rank's own step, with half of the batch, goes as far as one with all of it: both halves are the same here."""
    half = data_of(4).tensors
    data = TensorDataset(*(torch.cat([tensor, tensor]) for tensor in half))

    def script() -> list[float]:
        model = make_model()
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data, 8), loss="sum")
        for x, y in loader:
            sum_of_squares(model(x), y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    found = run_script(script, 2, "data consistency=local(1)")
    assert apart(found[0], script()) < 1e-6


# ---- no_sync


def accumulated(num_samples: int, loss: Loss, *, in_block: bool) -> list[float]:
    """Two batches to a step, the first of them inside of no_sync; then two steps of one batch."""
    model = make_model()
    model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(num_samples), 8), loss=loss)
    loss_of: Callable[..., Tensor] = nn.functional.mse_loss if loss == "mean" else sum_of_squares
    for number, (x, y) in enumerate(loader):
        if number == 0 and in_block:
            with no_sync():
                loss_of(model(x), y).backward()
        else:
            loss_of(model(x), y).backward()
        if number:
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("num_samples", [24, 14, 9])
def test_backward_without_exchange_gives_the_same(loss: Loss, num_samples: int) -> None:
    """Also where shares of the two batches differ, or a rank has nothing of the second."""
    found = run_script(partial(accumulated, num_samples, loss, in_block=True), 3)
    assert found[0] == found[1] == found[2]
    assert apart(found[0], accumulated(num_samples, loss, in_block=False)) < 1e-6


def test_no_sync_sends_nothing_and_a_step_inside_is_refused() -> None:
    def script() -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weave(model, optimizer, None)
        with no_sync():
            (model.weight * (1 + find_world().rank)).sum().backward()
        assert model.weight.grad is not None
        own = model.weight.grad.item()
        with pytest.raises(UsageError, match=r"not exchanged before optimizer\.step"):
            optimizer.step()
        (model.weight * 0).sum().backward()
        optimizer.step()
        return own, model.weight.grad.item()

    assert run_script(script, 2) == [(1.0, 1.5), (2.0, 1.5)]


def test_no_sync_of_one_model_is_not_settled_by_the_backward_of_another() -> None:
    def script() -> None:
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        weave(models, optimizers, None)
        with no_sync():
            models[0].weight.sum().backward()
        models[1].weight.sum().backward()
        with pytest.raises(UsageError, match="not exchanged"):
            optimizers[0].step()

    run_script(script, 2)


# ---- batch norm


def normalised(num_samples: int, loss: Loss, **options: Any) -> tuple[list[float], list[float], int]:
    """A batch norm over images and one without weights over vectors; weights, running statistics and their count."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 5, 1)), nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(15, 4),
        nn.BatchNorm1d(4, affine=False, momentum=None), nn.Linear(4, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 if loss == "mean" else 0.01)
    model, optimizer, loader = weave(model, optimizer, DataLoader(data_of(num_samples), 8), loss=loss, **options)
    loss_of: Callable[..., Tensor] = nn.functional.mse_loss if loss == "mean" else sum_of_squares
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    running = [buffer.double().flatten() for name, buffer in model.named_buffers() if "running" in name]
    count = next(buffer for name, buffer in model.named_buffers() if "tracked" in name)
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), torch.cat(running).tolist(), int(count)


@pytest.mark.parametrize("plan", ["data", "data topology=server"])
@pytest.mark.parametrize(("num_samples", "loss"), [(24, "mean"), (22, "mean"), (18, "mean"), (22, "sum")])
def test_global_batch_norm_is_that_of_one_process(plan: str, num_samples: int, loss: Loss) -> None:
    """Also of ragged shares, and where two samples are left for three ranks."""
    alone = normalised(num_samples, loss)
    for found in run_script(partial(normalised, num_samples, loss, batch_norm="global"), 3, plan):
        assert apart(found[0], alone[0]) < 2e-5 and apart(found[1], alone[1]) < 2e-5 and found[2] == alone[2]


def test_local_batch_norm_differs_and_is_told_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        found = run_script(partial(normalised, 24, "mean"), 2)
    assert apart(found[0][0], normalised(24, "mean")[0]) > 1e-4
    assert [record.message for record in caplog.records if 'batch_norm="global"' in record.message] != []
    assert len(caplog.records) == 1


def test_global_batch_norm_computes_as_torch_does_in_evaluation() -> None:
    def script() -> bool:
        model = nn.BatchNorm1d(5)
        weave(model, torch.optim.SGD(model.parameters(), lr=0.1), None, batch_norm="global")
        model.eval()
        x = torch.randn(1 + find_world().rank, 5)  # nobody meets
        return torch.equal(model(x), nn.functional.batch_norm(x, torch.zeros(5), torch.ones(5)))

    assert run_script(script, 2) == [True, True]


def test_global_batch_norm_needs_synchronous_ranks() -> None:
    with pytest.raises(PlanError, match=r"meet in every step.*local"):
        run_script(partial(normalised, 24, "mean", batch_norm="global"), 2, "data consistency=async topology=server")


@pytest.mark.parametrize("num_samples", [22, 17])
def test_a_share_of_one_sample_is_told_of_global_batch_norm(num_samples: int) -> None:
    """6 samples over four ranks leave one for two of them; of 1 sample the others get one that does not count."""
    with pytest.raises(UsageError, match=r"too small for batch norm.*batch_norm=\"global\""):
        run_script(partial(normalised, num_samples, "mean"), 4)


def test_another_error_of_batch_norm_is_torchs_own() -> None:
    def script() -> None:
        model = nn.BatchNorm1d(5)
        weave(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        with pytest.raises(ValueError, match="expected 2D or 3D"):
            model(torch.zeros(1, 5, 1, 1))

    run_script(script, 2)


# ---- gradients that do not come from backward

Use = Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]


def by_hand(model: nn.Module, _: torch.optim.Optimizer, loss: Tensor, *, is_mean: bool = False) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = mean(gradient) if is_mean else gradient


def in_part(model: nn.Module, _: torch.optim.Optimizer, loss: Tensor) -> None:
    """The last layer's by backward, the first one's by hand."""
    first, *rest = model.parameters()
    (gradient,) = torch.autograd.grad(loss, [first], retain_graph=True)
    loss.backward(inputs=rest)
    first.grad = gradient


def replaced(model: nn.Module, _: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-0.01, 0.01)


def stepped_twice(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def zeros_between(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """As those do that want an optimizer to have its state."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


USES: list[Use] = [partial(by_hand, is_mean=True), replaced, stepped_twice, zeros_between]


def use_gradients(use: Use) -> list[float]:
    model: nn.Module = make_model()
    model, optimizer, loader = weave(model, sgd(model), DataLoader(data_of(24), 8))
    for x, y in loader:
        use(model, optimizer, nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


@pytest.mark.parametrize("plan", ["data", "shard", "data compress=bf16"])
@pytest.mark.parametrize("use", USES)
def test_gradients_that_are_the_same_on_all_ranks_are_taken_wherever_they_come_from(use: Use, plan: str) -> None:
    first, second = run_script(partial(use_gradients, use), 2, plan)
    assert first == second
    assert apart(first, use_gradients(use)) < (1e-2 if "bf16" in plan else 1e-6)


@pytest.mark.parametrize("plan", ["data", "shard"])
@pytest.mark.parametrize("use", [by_hand, in_part])
def test_gradients_of_a_rank_alone_are_refused(use: Use, plan: str) -> None:
    with pytest.raises(UsageError, match=r"does not come from backward.*0\.weight.*loss\.backward\(\).*weft\.mean"):
        run_script(partial(use_gradients, use), 2, plan)


def test_gradients_by_hand_are_refused_after_steps_of_backward_too() -> None:
    def use(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        by_hand(model, optimizer, nn.functional.mse_loss(model(torch.rand(2, 5)), torch.rand(2, 1)))

    with pytest.raises(UsageError, match="does not come from backward"):
        run_script(partial(use_gradients, use), 2)


def test_nobody_meets_for_gradients_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.distributed.script.weaving.same_gradients._digest", lambda _: 1 / 0)
    run_script(train, 2)
    run_script(partial(accumulated, 24, "mean", in_block=True), 2)


# ---- shares that do not count


@pytest.mark.parametrize("plan", ["data", "shard", "data compress=bf16", "data topology=server", "data topology=ring"])
@pytest.mark.parametrize(("norm", "batch_norm"), [(nn.Identity, "local"), (nn.BatchNorm1d, "global")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_infinite_in_a_share_of_weight_0_stays_there(
    plan: str, norm: Callable[[int], nn.Module], batch_norm: Any, accumulate: int
) -> None:
    """A rank whose share of the second batch is all padding divides by 0 items."""
    x, y = data_of(16).tensors
    data = TensorDataset(x, y, torch.tensor([[1.0]] * 12 + [[0.0]] * 4))

    def script() -> list[float]:
        torch.manual_seed(3)
        model: nn.Module = nn.Sequential(nn.Linear(5, 4), norm(4), nn.Linear(4, 1))
        options: dict[str, Any] = {"weight": lambda batch: batch[2].sum(), "batch_norm": batch_norm}
        model, optimizer, loader = weave(model, sgd(model), DataLoader(data, 8), **options)
        for number, (x, y, mask) in enumerate(loader):
            ((model(x) - y).square() * mask).sum().div(mask.sum()).backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return nn.utils.parameters_to_vector(model.parameters()).tolist()

    found = run_script(script, 2, plan)
    assert found[0] == found[1] and torch.tensor(found[0]).isfinite().all()
    if norm is nn.Identity:  # padding is a part of the batch for a norm in one process
        assert apart(found[0], script()) < (1e-2 if "bf16" in plan else 1e-6)


# ---- random numbers


def test_ranks_draw_masks_of_their_own_and_rank_0_those_of_one_process() -> None:
    def script() -> list[float]:
        torch.manual_seed(1)
        model = nn.Linear(2, 1)
        weave(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
        return nn.functional.dropout(torch.ones(64)).tolist()

    first, second, third = run_script(script, 3)
    assert first == script()
    assert first != second != third != first
    assert run_script(script, 3) == [first, second, third]


def step_on_rank_1(_model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if find_world().rank == 1:
        optimizer.step()


def test_steps_that_one_rank_takes_alone_are_found_when_the_epoch_ends() -> None:
    """Once its weights drifted from the others', without a word. Here it has no gradients."""
    with pytest.raises(OutOfStepError, match="number of optimizer steps is 6 on rank 0, 7 on rank 1"):
        run_script(partial(train, after_epoch=step_on_rank_1), 2)


def test_a_rank_that_steps_again_with_the_same_gradients_is_found_at_once() -> None:
    with pytest.raises(TrainingError, match=r"rank 0 waits .*backward.*rank 1 waits .*own\.step\(\)"):
        run_script(partial(train, change=step_on_rank_1), 2)


def test_a_layer_that_is_put_in_after_weave_is_refused() -> None:
    def put_in(model: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
        cast(nn.Sequential, model)[2] = nn.Linear(8, 1)

    with pytest.raises(UsageError, match=r"model has got a parameter after weave.*\(2.weight\); weave it last"):
        run_script(partial(train, after_epoch=put_in), 2)
